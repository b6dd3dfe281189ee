"""Lookups and answers: arguments, rows, cursors, topics, batches. May import threads."""
