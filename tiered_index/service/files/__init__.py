"""Handles of files and the search in each. May import catalog, cold, root and what is below them."""
