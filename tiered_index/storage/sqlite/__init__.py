"""Objects in one SQLite database."""
