"""Profiles of the main operations, with a lower limit of the time of each."""
