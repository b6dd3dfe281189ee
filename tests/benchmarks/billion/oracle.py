"""Checks answers by DuckDB: it finds the messages of the keys in the source, and compares the answers of a lookup.

An index keeps whole seconds, so times are compared by the second.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.billion.data import KEYS_FILE, SOURCE, TOPICS

FOUND, SORTED = "found.parquet", "sorted"
MAX_COUNT = 64
_MEMORY = "6GB"
_SORTED_AT_ONCE = 250_000_000
_IDENTITY = 'hash(queue_id, "offset", size, timestamp_ms // 1000)'
_WRONG = {
    "keys without an answer": "FROM keys EXCEPT SELECT topic, key FROM given",
    "answers that are not complete": "FROM given WHERE status NOT IN ('complete', 'truncated')",
    "entries of no message": "FROM given ANTI JOIN wanted USING (topic, key, identity) WHERE position IS NOT NULL",
    "entries twice in an answer": """
        SELECT 1 FROM given WHERE position IS NOT NULL GROUP BY topic, key, identity HAVING count(*) > 1
    """,
    # of all sets of so many messages of a key, only those of the newest seconds have the greatest sum
    "answers with too few or too many entries, or older ones": f"""
        FROM (
            SELECT topic, key, count(*) AS many, sum(second) AS seconds
            FROM wanted WHERE place <= {MAX_COUNT} GROUP BY ALL
        ) w FULL JOIN (
            SELECT topic, key, count(*) AS many, sum(second) AS seconds
            FROM given WHERE position IS NOT NULL GROUP BY ALL
        ) g USING (topic, key) WHERE w.many IS DISTINCT FROM g.many OR w.seconds IS DISTINCT FROM g.seconds
    """,
    "truncated answers of keys with fewer messages": f"""
        FROM given SEMI JOIN (SELECT topic, key FROM wanted GROUP BY ALL HAVING count(*) < {MAX_COUNT})
        USING (topic, key) WHERE status = 'truncated'
    """,
    "complete answers of keys with more messages": f"""
        FROM given SEMI JOIN (SELECT topic, key FROM wanted WHERE place > {MAX_COUNT}) USING (topic, key)
        WHERE status = 'complete'
    """,
}
"""Problem -> the rows that have it."""


@contextlib.contextmanager
def _database(place: Path | str, keys: str = KEYS_FILE) -> Iterator[Any]:
    """A database with the views `source` and `keys`."""
    import duckdb

    folder = Path(place)
    settings: dict[str, Any] = {
        "temp_directory": str(folder / "spilled"),
        "memory_limit": _MEMORY,
        "preserve_insertion_order": False,
    }
    with duckdb.connect(config=settings) as db:
        for name, files in (("source", SOURCE), ("keys", keys)):
            db.sql(f"CREATE VIEW {name} AS FROM '{folder / files}/*.parquet'")
        yield db


def find(folder: Path | str) -> None:
    """Write all messages of the keys."""
    with _database(folder) as db:
        rows = "SELECT source.* FROM source JOIN keys USING (topic, key)"
        db.sql(f"COPY ({rows}) TO '{folder}/{FOUND}' (FORMAT parquet)")


def sort(place: str, entries: str) -> None:
    """Write all messages sorted by topic and key, a range of topics after the other so that each sort spills less."""
    parts = -(-int(entries) // _SORTED_AT_ONCE)
    # equal shares of the messages, because topics are drawn by the third power
    bounds = [f"topic-{round(TOPICS * (part / parts) ** 3):03}" for part in range(parts + 1)]
    folder = Path(place)
    (folder / SORTED).mkdir()
    with _database(folder) as db:
        for part, (low, high) in enumerate(itertools.pairwise(bounds)):
            rows = f"FROM source WHERE topic >= '{low}' AND topic < '{high}' ORDER BY topic, key"
            file = folder / SORTED / f"part-{part}.parquet"
            db.sql(f"COPY ({rows}) TO '{file}' (FORMAT parquet, COMPRESSION zstd)")


def look_up_sorted(folder: str, count: int = 20) -> dict[str, float]:
    """Look some keys up one by one, and all keys by a join; return the seconds of both."""
    with _database(folder) as db:
        db.sql(f"CREATE VIEW sorted AS FROM '{folder}/{SORTED}/*.parquet'")
        keys = db.sql(f"SELECT topic, key FROM keys LIMIT {count}").fetchall()
        taken = []
        for topic, key in keys:
            begun = time.perf_counter()
            db.execute("SELECT * FROM sorted WHERE topic = ? AND key = ?", [topic, key]).fetchall()
            taken.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        (joined,) = db.sql("SELECT count(*) FROM sorted JOIN keys USING (topic, key)").fetchone()
        (wanted,) = db.sql(f"SELECT count(*) FROM '{folder}/{FOUND}'").fetchone()
        if joined != wanted:
            raise RuntimeError(f"the sorted messages have {joined:,} of {wanted:,} messages of the keys")
        return {"one_key_s": sorted(taken)[count // 2], "all_keys_s": time.perf_counter() - begun}


def hottest(folder: Path) -> tuple[str, str, int]:
    """Return topic, key and number of messages of the key that has most."""
    with _database(folder) as db:
        row = db.sql(f"SELECT topic, key, count(*) FROM '{folder / FOUND}' GROUP BY ALL ORDER BY 3 DESC, 2 LIMIT 1")
        topic_key_count: tuple[str, str, int] = row.fetchone()
        return topic_key_count


def count(folder: Path, keys: str) -> int:
    """Return the number of messages of the keys in a file."""
    with _database(folder, keys) as db:
        messages: int = db.sql(f"SELECT count(*) FROM '{folder / FOUND}' JOIN keys USING (topic, key)").fetchone()[0]
        return messages


def older(folder: Path, second: int, topic: str, key: str) -> int:
    """Return the number of messages before `second`, without those of a key."""
    with _database(folder) as db:
        messages: int = db.execute(
            "SELECT count(*) FROM source WHERE timestamp_ms < ? AND NOT (topic = ? AND key = ?)",
            [second * 1000, topic, key],
        ).fetchone()[0]
        return messages


def check(folder: Path, answers: Path, keys: str = KEYS_FILE) -> dict[str, int]:
    """Compare the answers of a bulk lookup with the source; return how many keys and entries were compared.

    Up to 64 messages of a key must be in its answer, the newest ones where it has more. Raises `RuntimeError` where an
    answer is wrong.
    """
    with _database(folder, keys) as db:
        db.sql(
            f"""
            CREATE TEMP TABLE wanted AS SELECT topic, key, timestamp_ms // 1000 AS second, {_IDENTITY} AS identity,
            row_number() OVER (PARTITION BY topic, key ORDER BY second DESC) AS place
            FROM '{folder / FOUND}' SEMI JOIN keys USING (topic, key)
            """
        )
        db.sql(
            f"""
            CREATE TEMP TABLE given AS SELECT topic, key, status, position, timestamp_ms // 1000 AS second,
            {_IDENTITY} AS identity FROM '{answers}/*.parquet'
            """
        )
        for problem, rows in _WRONG.items():
            (wrong,) = db.sql(f"SELECT count(*) FROM ({rows})").fetchone()
            if wrong:
                raise RuntimeError(f"{answers}: {wrong:,} {problem}")
        counted, entries = db.sql("SELECT count(DISTINCT (topic, key)), count(position) FROM given").fetchone()
        return {"keys_checked": counted, "entries_checked": entries}
