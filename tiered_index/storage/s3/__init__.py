"""The storage in an S3 bucket. It may load boto3, so `storage/opening.py` imports it on use."""
