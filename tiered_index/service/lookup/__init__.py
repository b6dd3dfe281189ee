"""One lookup at work: budget, scan over files, query, messages. May import files and the folders below."""
