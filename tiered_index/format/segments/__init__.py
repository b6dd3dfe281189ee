"""Archived segments of logs, their catalogs, and ranges of offsets."""
