"""What a lookup is and what answers it: arguments, rows, cursors, topics, batches. May import threads."""
