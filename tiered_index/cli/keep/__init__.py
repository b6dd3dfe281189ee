"""The commands that merge, copy and delete."""
