"""The peers by their names on the command line; this index is the first."""

from __future__ import annotations

from tests.benchmarks.peers.duckdb import DuckDb
from tests.benchmarks.peers.innodb import InnoDb
from tests.benchmarks.peers.lmdb import Lmdb
from tests.benchmarks.peers.ours import Ours
from tests.benchmarks.peers.protocol import Peer
from tests.benchmarks.peers.rocketmq import RocketMq
from tests.benchmarks.peers.rocksdb import RocksDb
from tests.benchmarks.peers.sqlite import Sqlite

PEERS: dict[str, type[Peer]] = {
    "tiered_index": Ours,
    "rocketmq": RocketMq,
    "rocksdb": RocksDb,
    "lmdb": Lmdb,
    "sqlite": Sqlite,
    "innodb": InnoDb,
    "duckdb": DuckDb,
}
