"""The demo's storage: an embedded S3 server, a folder where its extra is missing, or what the user names.

The server is moto's, in its own process. It keeps objects in memory and answers as fast as Python can: it shows that
the protocol works, not how fast S3 is. The server ends when the block does, and also when this process dies, because it
reads this process's pipe to the end.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiered_index.errors import ConfigError, StorageUnavailable

__all__ = ["Place", "place_of"]

_ACCESS_KEY = _SECRET_KEY = "embedded-s3-of-the-demo"
_REGION = "us-east-1"
_BUCKET = "demo"
_PATIENCE_S = 5
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass(frozen=True)
class Place:
    """Where the demo's index lies: `label` for people, `environment` what its clients need."""

    uri: str
    label: str
    environment: dict[str, str]


@contextlib.contextmanager
def place_of(storage: str | None, folder: Path) -> Iterator[Place]:
    """Yield the storage: `storage` with a fresh prefix below it, else the embedded server, else a folder.

    Raises `ConfigError`.
    """
    if storage is not None:
        if storage.startswith("memory://"):
            raise ConfigError("memory:// lives in one process; the demo's writer is another one")
        before, mark, parameters = storage.partition("?")
        uri = f"{before.rstrip('/')}/demo-{uuid.uuid4().hex[:12]}{mark}{parameters}"
        yield Place(uri, uri, {})
    elif importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        uri = f"file://{folder / 'storage'}"
        yield Place(uri, "a folder (file://; for an embedded S3 server install the extra: tiered_index[demo])", {})
    else:
        with _embedded_s3() as endpoint_url:
            uri = f"s3://{_BUCKET}/index?endpoint_url={endpoint_url}&addressing_style=path"
            yield Place(uri, "embedded S3 (moto; its latencies are not those of S3)", _environment())


def _environment() -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
        "AWS_DEFAULT_REGION": _REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextlib.contextmanager
def _embedded_s3() -> Iterator[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for line in process.stdout:  # other lines: notices of libraries
            if line.startswith("port "):
                break
        else:
            raise StorageUnavailable("the embedded S3 server did not start")
        port = int(line.split()[1])
        _create_bucket(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_PATIENCE_S)
        process.stdout.close()


def _create_bucket(port: int) -> None:
    # one plain request: boto3 would be loaded at every start of the command line
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    try:
        connection.request("PUT", f"/{_BUCKET}")
        status = connection.getresponse().status
    finally:
        connection.close()
    if status != http.HTTPStatus.OK:
        raise StorageUnavailable(f"the embedded S3 server answered {status} when asked for a bucket")
