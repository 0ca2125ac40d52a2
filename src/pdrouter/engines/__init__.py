"""TRANSLATES. Pure functions from decisions to bytes and from bytes to facts."""
