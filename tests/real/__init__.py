"""Checks against engines that we didn't write; ``make test-vllm`` runs them, ``make test`` doesn't."""
