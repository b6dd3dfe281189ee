"""Commands that delete. Each is a dry run unless --yes."""
