"""The place of the state machine's index: a storage with scripted faults, its URI, and the URI of a second index beside
it.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.disk_faults import FaultDisk
from tests.support.s3_server import S3Server
from tests.support.storage_faults import FaultStorage, Lent
from tiered_index.storage.base import Storage
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage


@dataclass
class Place:
    """`inner` is the storage without faults; `uri` and `second` name two indexes."""

    inner: Storage
    uri: str
    second: str
    forget: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.storage = FaultStorage(Lent(self.inner))

    def close(self) -> None:
        self.inner.close()
        self.forget()


def memory(folder: Path) -> Place:
    name = uuid.uuid4().hex

    def forget() -> None:
        for below in ("a", "b"):
            MemoryStorage.forget(f"{name}/{below}")

    return Place(MemoryStorage(f"{name}/a"), f"memory://{name}/a", f"memory://{name}/b", forget)


def file(folder: Path) -> Place:
    return Place(LocalStorage(folder / "a", disk=FaultDisk()), f"file://{folder}/a", f"file://{folder}/b")


def sqlite(folder: Path) -> Place:
    uri = f"sqlite://{folder}/a.db"
    return Place(open_storage(uri), uri, f"sqlite://{folder}/b.db")


def s3(server: S3Server) -> Callable[[Path], Place]:
    """Return a function that makes places in a bucket of its own. The environment has the server's credentials."""
    bucket = server.new_bucket()

    def make(folder: Path) -> Place:
        name = uuid.uuid4().hex
        a, b = (f"s3://{bucket}/{name}/{below}?endpoint_url={server.endpoint_url}" for below in ("a", "b"))
        return Place(open_storage(a), a, b)

    return make
