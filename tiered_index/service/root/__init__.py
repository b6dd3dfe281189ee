"""The local root: folders, marker, lock, durable deletions. Imports no other folder of the service."""
