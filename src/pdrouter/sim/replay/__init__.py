"""A trace against a live endpoint, in real time."""
