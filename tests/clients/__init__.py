"""Clients that we didn't write, through the router, over emulated engines."""
