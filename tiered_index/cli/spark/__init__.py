"""The commands that run on Spark."""
