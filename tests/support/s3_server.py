"""An S3 server for tests and the demo: moto's, in a process of its own, on a loopback port that the system chose.

    with s3_server() as server:
        bucket = server.new_bucket()

It ends with the block. It also reads the pipe of the process that started it, and ends with that process. moto keeps
everything in memory and copies whole objects for a range. So keep objects below 16 MiB, and measure nothing here.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from tests.support.child import Child
from tiered_index.errors import StorageUnavailable

if TYPE_CHECKING:
    import pytest

SECRET_KEY = "testing-secret-key"
REGION = "us-east-1"
# the client's credentials, as environment variables of the usual credential chain, and none that point elsewhere
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing-access-key",
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
_TIMEOUT_S = 60

# moto checks a name and then takes it, in two steps, and shows an object before it has all of it. Requests come in
# threads. So one request acts at a time, once its body has been read.
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
    """A running server. `environment` has the variables that a client needs for access."""

    environment: ClassVar[dict[str, str]] = CREDENTIALS
    endpoint_url: str

    def let_in(self, patch: pytest.MonkeyPatch) -> None:
        """Let boto3's usual chain find the server's credentials, and nothing of the machine's own set-up."""
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_REGION"):
            patch.delenv(name, raising=False)
        for name, value in self.environment.items():
            patch.setenv(name, value)

    def new_bucket(self, name: str | None = None) -> str:
        """Create a bucket, with a unique name by default, and return the name. Raises `StorageUnavailable`."""
        name = name or f"bucket-{uuid.uuid4().hex}"
        # one plain request: boto3 takes long to load
        connection = http.client.HTTPConnection(urlsplit(self.endpoint_url).netloc, timeout=_TIMEOUT_S)
        try:
            connection.request("PUT", f"/{name}")
            status = connection.getresponse().status
        finally:
            connection.close()
        if status != http.HTTPStatus.OK:
            raise StorageUnavailable(f"the embedded S3 server answered {status} when asked for a bucket")
        return name


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server, yield it when it answers, and stop it. Raises `StorageUnavailable` if it does not start."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with Child("-W", "ignore", "-c", _SERVE, env=environment, stderr=subprocess.DEVNULL) as child:
        for line in child.stdout:  # other lines are notices of libraries
            if line.startswith("port "):
                break
        else:
            status = child.process.wait(_TIMEOUT_S)
            raise StorageUnavailable(f"the embedded S3 server did not start (exit status {status})")
        yield S3Server(f"http://127.0.0.1:{int(line.split()[1])}")
