"""Objects in an S3 bucket. Nothing outside imports it but `storage/opening.py`, when it is asked for."""
