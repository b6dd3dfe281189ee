"""MariaDB's InnoDB: a server of its own on a socket in the folder, started and stopped with the peer.

The settings are those that MariaDB's documentation advises: a buffer pool for all data that may be cached, and a large
log. Further ones are `innodb_flush_log_at_trx_commit = 1` (a commit is durable) and `O_DIRECT`. Rows come in order of
the primary key, by `LOAD DATA INFILE` ("How to Quickly Insert Data Into MariaDB"). Its input files are in memory.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from tests.benchmarks.memory import disk_bytes
from tests.benchmarks.peers.data import hash_of, native_table
from tests.benchmarks.peers.protocol import CACHE_BYTES, Peer

_TABLE = """CREATE TABLE IF NOT EXISTS bench.entries (
    `key` BIGINT, `offset` BIGINT, queue_id INT, topic_id INT, size INT, second INT,
    PRIMARY KEY (`key`, `offset`, queue_id, topic_id)) ENGINE=InnoDB"""
_ONE = "SELECT `offset`, queue_id, topic_id, size, second FROM bench.entries WHERE `key` = %d"
_AT_ONCE = 1_000
_START_S = 120.0


class InnoDb(Peer):
    """A clustered B+ tree in a server. Every call is a round trip over the socket."""

    name = "MariaDB InnoDB"
    modules = ("pymysql",)
    programs = ("mariadbd", "mariadb-install-db", "my_print_defaults")

    @classmethod
    def version(cls) -> str:
        server = subprocess.run(["mariadbd", "--version"], check=True, capture_output=True, text=True).stdout
        return f"{server.split()[2]}, {super().version()}"

    def open(self) -> None:
        # in the worker's folder: a socket's path can have at most 107 characters
        data, self._socket = self.folder / "mariadb", self.folder / "socket"
        own = ("--no-defaults", f"--datadir={data}", f"--user={getpass.getuser()}")
        if not data.exists():
            data.mkdir(parents=True)
            install = ("mariadb-install-db", *own, "--skip-test-db", "--auth-root-authentication-method=normal")
            subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        self._socket.unlink(missing_ok=True)
        self._log = (self.folder / "server.log").open("ab")
        serve = (
            "mariadbd",
            *own,
            f"--socket={self._socket}",
            f"--pid-file={self.folder / 'pid'}",
            "--skip-networking",
            "--skip-log-bin",
            "--secure-file-priv=",
            f"--innodb-buffer-pool-size={CACHE_BYTES}",
            "--innodb-log-file-size=256M",
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-flush-method=O_DIRECT",
            # pages per second of a solid-state disk; the default is 200, for a hard disk
            "--innodb-io-capacity=10000",
            "--innodb-io-capacity-max=20000",
        )
        self._server = subprocess.Popen(serve, stdout=self._log, stderr=self._log)
        self._connect()
        self._run("CREATE DATABASE IF NOT EXISTS bench")
        self._run(_TABLE)

    def _connect(self) -> None:
        import pymysql

        end_s = time.monotonic() + _START_S
        while True:
            # a failed attempt leaves PyMySQL's socket open, so this waits before it connects
            with suppress(pymysql.err.OperationalError):
                if self._socket.exists():
                    self._db = pymysql.connect(unix_socket=str(self._socket), user="root", autocommit=True)
                    return
            if self._server.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"mariadbd did not start: {(self.folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.01)

    def _run(self, statement: str) -> Any:
        with self._db.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    def prepare(self, entries: pa.RecordBatch) -> Any:
        shared = Path("/dev/shm")
        handle, name = tempfile.mkstemp(prefix="tiered-index-peers-", dir=shared if shared.is_dir() else None)
        with open(handle, "wb") as file:
            pa.csv.write_csv(native_table(entries), file, pa.csv.WriteOptions(include_header=False))
        return name

    def put_batch(self, prepared: Any) -> None:
        self._run(f"LOAD DATA INFILE '{prepared}' REPLACE INTO TABLE bench.entries FIELDS TERMINATED BY ','")
        os.unlink(prepared)

    def lookup(self, key: str) -> Any:
        return self._run(_ONE % hash_of(key))

    def lookup_many(self, keys: list[str]) -> Any:
        found: list[Any] = []
        for at in range(0, len(keys), _AT_ONCE):
            wanted = ",".join(str(hash_of(key)) for key in keys[at : at + _AT_ONCE])
            found += self._run(f"SELECT * FROM bench.entries WHERE `key` IN ({wanted})")
        return found

    def idle_call(self, key: str) -> None:
        self._run(f"SELECT {hash_of(key)}")

    def settle(self) -> None:
        # "after large amounts of data have been added": without it a lookup of many keys scans the table
        self._run("ANALYZE TABLE bench.entries")
        self._run("SET GLOBAL innodb_max_dirty_pages_pct = 0")
        while int(self._run("SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_pages_dirty'")[0][1]) > 0:
            time.sleep(0.05)

    def close(self) -> None:
        self._run("SHUTDOWN")
        self._db.close()
        self._server.wait(_START_S)
        self._log.close()

    def stored_bytes(self) -> int:
        return disk_bytes(self.folder / "mariadb" / "bench" / "entries.ibd")

    def server_pids(self) -> list[int]:
        return [self._server.pid]
