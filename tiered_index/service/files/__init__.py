"""Handles of files, and the search in them. It may import catalog, cold and root, and the folders that these import."""
