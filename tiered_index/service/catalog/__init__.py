"""The file handles that lookups see, in a skip list by time range. It may import answers and threads."""
