"""What a reader sees of logs, roots and several indexes. May import lookup, files and what stands below."""
