"""An S3 server for tests: moto's, in a process of its own, on a loopback port that the system chose.

    with s3_server() as server:
        bucket = server.new_bucket()

It ends when the block does, and also when the process that started it dies, because it reads that process's pipe to the
end. moto keeps everything in memory and copies whole objects for a range: keep objects below 16 MiB and measure nothing
here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import boto3
from botocore.config import Config

ACCESS_KEY = "testing-access-key"
SECRET_KEY = "testing-secret-key"
REGION = "us-east-1"
# what a client needs to be let in: environment variables of the usual credential chain, and none that lead elsewhere
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

# moto looks whether a name is taken and then takes it, and shows an object before it has all of it; requests come in
# threads. So one acts at a time, once its body has been read.
_SERVE = """
import functools, sys, threading
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
acting = threading.RLock()
def alone(act):
    @functools.wraps(act)
    def acted(*given, **named):
        with acting:
            return act(*given, **named)
    return acted
for name in ("_key_response", "_bucket_response"):
    setattr(S3Response, name, alone(getattr(S3Response, name)))
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass(frozen=True)
class S3Server:
    """A running server; `environment` is what a client needs to be let in."""

    endpoint_url: str

    @property
    def environment(self) -> dict[str, str]:
        """Return `CREDENTIALS`."""
        return dict(CREDENTIALS)

    def new_bucket(self) -> str:
        """Create a bucket of a unique name and return the name."""
        name = f"bucket-{uuid.uuid4().hex}"
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(s3={"addressing_style": "path"}),
        )
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server, yield it once it answers, stop it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin and process.stdout
    try:
        for line in process.stdout:  # other lines: notices of libraries
            if line.startswith("port "):
                break
        else:
            raise RuntimeError(f"moto's server did not start (exit status {process.wait(10)})")
        yield S3Server(f"http://127.0.0.1:{int(line.split()[1])}")
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
        process.stdout.close()
