"""The commands, as the command line declares them: their options and their help. Their work loads when they run."""
