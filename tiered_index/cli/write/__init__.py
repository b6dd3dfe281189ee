"""The commands that write entries: their options, and their work."""
