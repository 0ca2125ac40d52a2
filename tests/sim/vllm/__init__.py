"""Tests of the emulated vLLM."""
