"""The policy study: what is compared, what is aimed at, and the document that tells it."""
