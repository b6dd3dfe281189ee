"""Commands that bring an index back: a root after a crash, an index of its archived segments."""
