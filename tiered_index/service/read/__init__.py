"""Reading: snapshots of indexes and their files, the search, the cold path, caches, answers, several indexes as one."""
