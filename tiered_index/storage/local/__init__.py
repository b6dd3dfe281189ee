"""Objects as files in a folder. May import the contract (`base`) and `disk`."""
