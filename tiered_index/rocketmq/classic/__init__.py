"""The broker's classic index files: read, written, imported. May import follow, log."""
