"""Commands that recover an index: a root after a crash, an index from its archived segments."""
