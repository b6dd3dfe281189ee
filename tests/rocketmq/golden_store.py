"""RocketMQ's golden store for tests: unpacked on disk, its messages as RocketMQ's own decoder read them, and a copy
that `StoreWriter` writes.
"""

import base64
import gzip
import json
from collections.abc import Iterator
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from tests.support.store_writer import StoreWriter
from tiered_index.connectors.rocketmq.classic import Geometry
from tiered_index.connectors.rocketmq.log.layout import Host

DATA = Path(__file__).parents[1] / "golden" / "data" / "store" / "full"
SEGMENT_BYTES = 16_384
QUEUE_ENTRIES = 64
GEOMETRY = Geometry(50, 120)
END = 89_082


def raw(name: str) -> bytes:
    plain = DATA / name
    return plain.read_bytes() if plain.exists() else gzip.decompress((DATA / f"{name}.gz").read_bytes())


def names(folder: str = "") -> list[str]:
    """Return the names of the store's files below a folder, relative to the store."""
    paths = (path for path in (DATA / folder).rglob("*") if path.is_file())
    files = sorted({str(path.relative_to(DATA)).removesuffix(".gz") for path in paths})
    return [name for name in files if "/" in name or name == "checkpoint"]


def unpack(folder: Path) -> Path:
    """Write the store into a folder; return the folder."""
    for name in names():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw(name))
    return folder


@cache
def expected() -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw("expected.jsonl").splitlines()]


@cache
def segments() -> dict[int, bytes]:
    return {int(Path(name).name): raw(name) for name in names("commitlog")}


def host(text: str) -> Host:
    """Return a host as Java prints it."""
    ip, port = text.rsplit(":", 1)
    return Host(str(ip_address(ip)), int(port))


def body(message: dict[str, Any]) -> bytes:
    return base64.b64decode(message["rawBody"] or "")


def hidden(message: dict[str, Any]) -> bool:
    return message["kind"] in ("prepared", "rollback")


def keys(message: dict[str, Any]) -> list[str]:
    """Return the index keys of RocketMQ's dispatch request: unique key and KEYS, without empty ones, each once."""
    candidates = [message["dispatch"]["uniqKey"], *(message["dispatch"]["keys"] or "").split(" ")]
    return list(dict.fromkeys(key for key in candidates if key))


def rows() -> Iterator[tuple[str, int, str, int, int, int]]:
    """Yield the entries that the index must have: topic, queue id, key, offset, size, store timestamp."""
    for message in expected():
        place = message["offset"], message["totalSize"], message["storeTimestamp"]
        for key in [] if hidden(message) else keys(message):
            yield message["topic"], message["queueId"], key, *place


def write_again(root: Path) -> StoreWriter:
    """Put all golden messages into a new store; return its writer, which is neither flushed nor closed."""
    index_names = iter(Path(name).name for name in names("index"))
    files = {"segment_bytes": SEGMENT_BYTES, "queue_entries": QUEUE_ENTRIES, "index": GEOMETRY}
    writer = StoreWriter(root, **files, index_name=lambda: next(index_names))  # type: ignore[arg-type]
    for message in expected():
        put = writer.put(
            message["topic"],
            message["queueId"],
            body(message),
            properties=message["propertiesString"],
            sys_flag=message["sysFlag"],
            flag=message["flag"],
            born_ms=message["bornTimestamp"],
            born_host=host(message["bornHost"]),
            store_ms=message["storeTimestamp"],
            store_host=host(message["storeHost"]),
            reconsume_times=message["reconsumeTimes"],
            prepared_offset=message["preparedTransactionOffset"],
        )
        assert put == (message["offset"], message["bytes"], message["queueOffset"])
    return writer
