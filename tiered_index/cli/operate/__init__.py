"""The commands that serve, verify and repair."""
