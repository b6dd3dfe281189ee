"""The plan and the rewriting of files that merges and erasures share."""
