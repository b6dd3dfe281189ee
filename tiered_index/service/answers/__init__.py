"""Lookups and answers: arguments, rows, cursors, topics, batches. It may import threads."""
