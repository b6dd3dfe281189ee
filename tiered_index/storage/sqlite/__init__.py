"""Objects in one SQLite database. May import the contract (`base`)."""
