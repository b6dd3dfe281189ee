"""The commands that look up entries and messages."""
