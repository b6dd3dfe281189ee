"""A process may have few descriptors: 1,024 is Linux's default, and the limit here is a tenth of it.

Files that wait for compaction, for the storage or for retirement must not use them up. A root with more files must
open.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import tests

REPOSITORY = Path(tests.__file__).parent.parent
SCRIPT = """
import resource, sys
files, limit = map(int, sys.argv[2:])
# the soft limit may be raised to the hard one: the files could not keep all that they had when they were written
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
hard = 3 * limit if hard == resource.RLIM_INFINITY else min(3 * limit, hard)
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index import IndexReader, IndexService
from tiered_index.storage.memory import MemoryStorage
from tests.support.storage_faults import FaultStorage

for state in ("unsealed", "compacted", "uploaded"):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    root = f"{sys.argv[1]}/{state}"
    storage, settings = FaultStorage(MemoryStorage()), {"background": False, "query_threads": 2}
    service = IndexService.open(root=root, storage_backend=storage, disk=UnsyncedDisk(), slots=7, items=4, **settings)
    if state == "compacted":
        storage.fail("put", times=None, name_prefix="data/")
    for number in range(3 * files):
        service.put("t", 0, "k", number, 1, 1_700_000_000_000 + number * 1000)
        if number % 60 == 59:
            service.flush()
            if state != "unsealed":
                try:
                    service.run_lifecycle()
                except Exception as error:
                    assert "scripted fault" in str(error), error
    service.flush()
    assert len(service.query("t", "k", max_count=10**6)) == 3 * files
    service.close()
    del service
    service = IndexService.open(root=root, storage_backend=storage, disk=UnsyncedDisk(), **settings)
    assert len(service.files()) == files
    assert len(service.query("t", "k", max_count=10**6)) == 3 * files
    with IndexReader.open(root=root, storage_backend=storage, query_threads=2) as beside:
        assert len(beside.query("t", "k", max_count=10**6)) == 3 * files
    service.abandon()
    print(state)
"""


@pytest.mark.parametrize(
    ("files", "limit"),
    [pytest.param(120, 96, id="few"), pytest.param(1200, 1024, id="default", marks=pytest.mark.slow)],
)
def test_more_files_than_the_limit_wait(tmp_path, files, limit):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(files), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, cwd=REPOSITORY, check=False)
    assert done.stdout.split() == ["unsealed", "compacted", "uploaded"], done.stderr[-600:]
