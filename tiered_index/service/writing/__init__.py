"""From `put` to the unsealed file: write buffer, flusher, appenders. May import files and the folders below it."""
