"""While another thread made a database, it was taken for one of another program: its marks were read at different
moments.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiered_index.errors import ObjectExists
from tiered_index.storage.opening import open_storage

_RACERS = 8


def test_the_first_puts_of_many_find_one_database(tmp_path: Path) -> None:
    for attempt in range(40):
        uri = f"sqlite://{tmp_path}/{attempt}.db"
        barrier = threading.Barrier(_RACERS)

        def race(racer: int, uri: str = uri, barrier: threading.Barrier = barrier) -> bool:
            with open_storage(uri) as storage:
                barrier.wait(30)
                try:
                    storage.put_if_absent("log/1", b"%d" % racer)
                except ObjectExists:
                    return False
                return True

        with ThreadPoolExecutor(_RACERS) as pool:
            assert sum(pool.map(race, range(_RACERS))) == 1
