"""Keys: their hashes and filters."""
