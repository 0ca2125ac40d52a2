"""``make abuse``: hostile clients, engines, disks and settings against a real router, each with what must happen."""
