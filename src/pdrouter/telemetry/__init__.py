"""TELLS. Reads facts and writes metrics and logs; no logic depends on it."""
