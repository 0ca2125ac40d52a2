"""Engines without GPUs: timing model, emulator, workloads, demo."""
