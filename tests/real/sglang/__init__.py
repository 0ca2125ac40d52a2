"""Checks against real SGLang on a CPU; ``make test-sglang`` runs them, ``make test`` doesn't."""
