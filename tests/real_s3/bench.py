"""`python -m tests.benchmarks cold` on the S3 server that `make bench SUITE=s3` started, or the one that
TIERED_INDEX_TEST_S3_ENDPOINT names.

    python -m tests.real_s3.server run -- python -m tests.real_s3.bench [ARGUMENTS OF BENCH]

The bucket is TIERED_INDEX_TEST_S3_BUCKET, or one made for the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Sequence

import boto3
from botocore.config import Config

from tests.real_s3.conftest import BUCKET_VARIABLE
from tests.real_s3.server import ENDPOINT_VARIABLE


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return its exit status."""
    endpoint_url, named = os.environ.get(ENDPOINT_VARIABLE), os.environ.get(BUCKET_VARIABLE)
    if not endpoint_url:
        otherwise = f"set {ENDPOINT_VARIABLE} and the AWS_* variables"
        print(f"there is no S3 server to measure: run `make bench SUITE=s3`, or {otherwise}", file=sys.stderr)
        return 2
    bucket = named or f"tiered-index-bench-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=endpoint_url, config=Config(s3={"addressing_style": "path"}))
    if not named:
        client.create_bucket(Bucket=bucket)
    try:
        storage = f"s3://{bucket}/bench?endpoint_url={endpoint_url}"
        program = [sys.executable, "-m", "tests.benchmarks"]
        return subprocess.run([*program, "cold", "--storage", storage, *arguments], check=False).returncode
    finally:
        if not named:
            client.delete_bucket(Bucket=bucket)
        client.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
