"""Tests of what the router tells of itself."""
