"""The file handles that lookups see, in a skip list by time range. May import answers, threads."""
