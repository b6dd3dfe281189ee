"""Audits an index on executors, and compares it with its source. May import lookup, writing."""
