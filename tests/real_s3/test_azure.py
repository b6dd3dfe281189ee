"""`az://` against Azurite, Microsoft's emulator, which npm installs once into the cache of the S3 server."""

import base64
import contextlib
import hashlib
import hmac
import http.client
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from tests.real_s3.packages import cache_folder
from tests.support.ports import free_ports
from tiered_index.errors import ObjectExists, StorageMisconfigured
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.testing.storage_conformance import StorageConformance

pytestmark = pytest.mark.real_s3

VERSION = "3.35.0"
# the emulator's own account, which its documentation names
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
STARTS_S = 60


@pytest.fixture(scope="module")
def azurite() -> Iterator[str]:
    """Return the endpoint of a running emulator, which keeps all data in memory."""
    folder = cache_folder() / f"azurite-{VERSION}"
    program = folder / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.fail("the tests of az:// need node and npm")
    if not program.exists():
        made = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
        made.mkdir(parents=True)
        install = [npm, "install", "--silent", "--no-audit", "--no-fund", f"azurite@{VERSION}"]
        subprocess.run(install, cwd=made, check=True, timeout=300)
        with contextlib.suppress(OSError):  # another process was first
            made.rename(folder)
    (port,) = free_ports(1)
    options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    process = subprocess.Popen([node, str(program), *options, "--blobPort", str(port)], stdout=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + STARTS_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until_s, "Azurite does not start"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        process.kill()
        process.wait(STARTS_S)


@pytest.fixture
def uri(azurite: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The storage of a new container."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    container = f"c{uuid.uuid4().hex}"
    date = formatdate(usegmt=True)
    version = "2021-08-06"
    signed = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{container}\n"
    digest = hmac.new(base64.b64decode(KEY), f"{signed}restype:container".encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }
    connection = http.client.HTTPConnection(azurite.split("/")[2], timeout=STARTS_S)
    connection.request("PUT", f"/{ACCOUNT}/{container}?restype=container", headers=headers)
    assert connection.getresponse().status == http.HTTPStatus.CREATED
    connection.close()
    return f"az://{container}/some/prefix?account={ACCOUNT}&endpoint_url={azurite}"


class TestAzureStorage(StorageConformance):
    has_etags = True

    @pytest.fixture
    def storage(self, uri: str) -> Iterator[Storage]:
        with open_storage(uri) as storage:
            yield storage

    @pytest.fixture
    def another(self, storage: Storage) -> Iterator[Storage]:
        with open_storage(storage.uri) as another:
            yield another


def test_requests_are_counted_and_put_if_absent_is_honoured(uri: str) -> None:
    with open_storage(uri) as opened:
        probe_put_if_absent(opened)
        storage = MeteredStorage(opened)
        storage.put_if_absent("a", b"data")
        with pytest.raises(ObjectExists):
            storage.put_if_absent("a", b"other")
        assert storage.get_range("a", 1, 2) == b"at"
        assert storage.get_suffix("a", 2) == (b"ta", 4)
        # a suffix takes a HEAD and a GET
        assert storage.total.requests == 5


def test_large_uploads_and_missing_containers(uri: str) -> None:
    bodies = [bytes([n]) * (6 << 20) for n in range(3)]
    with open_storage(uri) as storage:
        with storage.open_writer("large") as writer:
            for body in bodies:
                writer.write(body)
        assert storage.get("large") == b"".join(bodies)
    container = uri.removeprefix("az://").partition("/")[0]
    with open_storage(uri.replace(container, "no-such-container")) as storage:
        for call in (lambda: storage.get("a"), lambda: storage.put("a", b""), lambda: list(storage.list())):
            with pytest.raises(StorageMisconfigured, match=r"ContainerNotFound.*create the bucket"):
                call()
