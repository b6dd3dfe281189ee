"""The storage that keeps objects as files in a folder. May import the contract (`base`) and `disk`."""
