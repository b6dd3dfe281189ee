"""The execution of lookups: budget, scan over files, query, messages. It may import files and what that imports."""
