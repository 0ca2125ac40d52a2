"""Tests of the engines: decisions to bytes, bytes to facts."""
