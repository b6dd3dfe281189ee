"""A larger golden store: the rule by which its messages were made, and the hashes of its files.

RocketMQ's `DefaultMessageStore` (8fc57f14) put these messages into a store. `data/store/large/java.json.gz` has the
times at which it stored them and made its index files, and the SHA-256 of its files.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.store_writer import StoreWriter
from tests.support.stored_messages import format_properties
from tiered_index.connectors.rocketmq.classic import Geometry
from tiered_index.connectors.rocketmq.log.layout import Host

DATA = Path(__file__).parents[1] / "golden" / "data" / "store" / "large" / "java.json.gz"
MESSAGES = 8_000
GEOMETRY = Geometry(200, 1_000)
TOPICS = [*(f"topic-{name}" for name in "abcdefghij"), "T" * 200, "SCHEDULE_TOPIC_XXXX", "TBW102"]
IPV4, IPV6 = (Host("10.1.2.3", 54321), Host("127.0.0.1", 10911)), Host("fe80::abcd", 10912)


@cache
def java() -> dict[str, Any]:
    return json.loads(gzip.decompress(DATA.read_bytes()))


def messages() -> Iterator[dict[str, Any]]:
    """Yield the arguments of `StoreWriter.put` for each message, except the time at which it is stored."""
    for n in range(MESSAGES):
        chance = hashlib.sha256(f"message {n}".encode()).digest()
        number = int.from_bytes(chance[:6], "big")
        topic = TOPICS[number % len(TOPICS)]
        named = {}
        if chance[8] % 5:
            named["KEYS"] = f"order-{number % 977}" + f" user-{number % 89}" * (chance[7] % 3)
        if chance[9] % 7:
            named["UNIQ_KEY"] = f"{number:012X}{n:020X}"
        if chance[10] % 3:
            named["TAGS"] = f"Tag{'ABC'[chance[10] % 3]}"
        if topic == "SCHEDULE_TOPIC_XXXX":
            named["DELAY"] = str(1 + chance[11] % 18)
        if chance[12] % 11 == 0:
            named["note"] = "größe 主题 🚀"
        sys_flag = (0, 0, 0, 4, 8, 12)[chance[13] % 6]
        yield {
            "topic": topic,
            "queue_id": chance[14] % 8,
            "body": (chance * 16)[: chance[15] * 2],
            "properties": format_properties(named),
            "sys_flag": sys_flag,
            "flag": chance[18],
            "born_ms": 1_700_000_000_000 + n,
            "born_host": IPV6 if chance[16] % 9 == 0 else IPV4[0],
            "store_host": IPV6 if chance[17] % 9 == 0 else IPV4[1],
            "reconsume_times": chance[19] % 4,
            "prepared_offset": chance[20] if sys_flag in (8, 12) else 0,
        }


def write(root: Path) -> StoreWriter:
    """Put the messages into a new store as RocketMQ did; return its writer, which is neither flushed nor closed."""
    names = iter(java()["index_files"])
    writer = StoreWriter(
        root, segment_bytes=1 << 17, queue_entries=3, index=GEOMETRY, index_name=lambda: str(next(names))
    )
    store_ms = 0
    for message, later_ms in zip(messages(), java()["store_ms_steps"], strict=True):
        store_ms += later_ms
        writer.put(**message, store_ms=store_ms)
    return writer


def digests(store: Path) -> dict[str, list[Any]]:
    """Return the number of files in each part of a store (queues by topic), and the SHA-256 of names and bytes."""
    summary: dict[str, list[Any]] = {}
    parts = {name: store / name for name in ("commitlog", "index")}
    parts |= {f"consumequeue/{path.name}": path for path in (store / "consumequeue").iterdir()}
    for name, folder in parts.items():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        digest = hashlib.sha256()
        for path in files:
            digest.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        summary[name] = [len(files), digest.hexdigest()]
    return summary
