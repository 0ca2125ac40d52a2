"""The exact bytes that engines get, one readable fixture a case."""
