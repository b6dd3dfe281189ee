"""What is in one index file, whatever its kind and wherever its bytes lie: for `inspect`, `dump` and `verify`."""
