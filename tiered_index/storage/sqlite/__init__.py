"""The storage that keeps objects in one SQLite database. May import the contract (`base`)."""
