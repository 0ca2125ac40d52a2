"""Tests of pdrouter."""
