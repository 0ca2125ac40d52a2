"""Tests of ``pdrouter.upstream`` against raw sockets."""
