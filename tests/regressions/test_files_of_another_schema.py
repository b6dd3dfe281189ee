"""A root accepted a file of another schema. Lookups failed with untyped errors or read its columns as theirs, new
entries were appended to it, and the life cycle published it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest

from tests.regressions.conftest import ASK
from tiered_index import KeyedIndexItem, column
from tiered_index.errors import SchemaMismatch
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000


@dataclass(frozen=True, kw_only=True)
class Wider(KeyedIndexItem):
    number: int = column(">u4")


OTHERS = {"rocketmq": {"preset": "rocketmq"}, "wider": {"item_type": Wider, "more": {"number": 5}}}


@pytest.fixture(params=OTHERS)
def other(request):
    return OTHERS[request.param]


@pytest.fixture(params=["unsealed", "compacted"])
def copied(request, other, open_index, leave_compacted, tmp_path):
    """A root with one message, and a file of another root in it; return that file's paths and bytes there."""
    service = open_index()
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    service.close()
    state = request.param
    if state == "compacted":
        leave_compacted("other", storage_backend=MemoryStorage(), **other).close()
    else:
        settings = {name: value for name, value in other.items() if name != "more"}
        stranger = open_index("other", storage_backend=MemoryStorage(), **settings)
        stranger.put("t", 0, "k", 1, 1, NOW_MS, **other.get("more", {}))
        stranger.close()
    files = {}
    for path in (tmp_path / "other" / state).iterdir():
        target = tmp_path / "root" / state / path.name
        shutil.copy(path, target)
        files[target] = target.read_bytes()
    assert {path.suffix for path in files} == ({".index"} if state == "compacted" else {".index", ".journal"})
    return files


def check_told(asked, ask, file_id, wanted):
    """Check that errors name the file, and that partial answers have all other entries."""
    with pytest.raises(SchemaMismatch, match=file_id):
        ask(asked)
    result = ask(asked, allow_partial=True)
    assert (result.status, [item.offset for item in result]) == ("partial", wanted)
    assert [report.file for report in result.failed] == [file_id]


def test_it_is_named_kept_and_never_published(open_index, open_reader, copied):
    file_id = next(iter(copied)).stem
    for first in (2, 3):
        service = open_index()
        wanted = list(reversed(range(1, first)))
        for ask in ASK.values():
            check_told(service, ask, file_id, wanted)
        service.put("t", 0, "k", first, 1, NOW_MS + 1000 * first)
        service.seal()
        service.run_lifecycle()
        assert {path: path.read_bytes() for path in copied if path.exists()} == copied
        assert file_id not in {o.file_id for o in service.log_state.objects.values()}
        service.close()
        with open_reader() as reader:
            result = reader.query("t", "k")
            assert (result.status, [item.offset for item in result]) == ("complete", [first, *wanted])


def test_a_reader_beside_it_names_it_too(open_reader, copied):
    reader = open_reader("root")
    for ask in ASK.values():
        check_told(reader, ask, next(iter(copied)).stem, [1])
