"""The data plane over real emulators."""
