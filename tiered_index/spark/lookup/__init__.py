"""Bulk lookup: answers for each row of a DataFrame of keys. May import writing."""
