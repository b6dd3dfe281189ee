"""A reader's view of logs, roots and several indexes. May import lookup, files and the folders below them."""
