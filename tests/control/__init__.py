"""The control plane over real emulators."""
