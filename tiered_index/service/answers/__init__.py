"""What a lookup is and what answers it: validated arguments, rows, cursors, topics, batches of lookups and their
matches. May import threads.
"""
