"""The rows of answers, and their messages."""
