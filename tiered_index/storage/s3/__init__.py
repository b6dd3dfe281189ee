"""Objects in an S3 bucket. Loads boto3, so only `storage/opening.py` imports it, when it is asked for."""
