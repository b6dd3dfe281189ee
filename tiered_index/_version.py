"""The version of this program, written into every file it makes."""

__version__ = "0.1.0"
