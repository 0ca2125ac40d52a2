"""What goes wrong, and that it stays where it happened."""
