"""DECIDES. Values in, values out: no I/O, no clock, no randomness of its own. Start reading in ``router.py``."""
