"""Properties: statements that hold over any course of events."""
