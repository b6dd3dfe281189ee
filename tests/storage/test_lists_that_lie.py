"""Lists whose short answer would be a wrong one are whole on services that end a page early, or are errors."""

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.storage.conftest import WAYS
from tests.storage.lying_server import PAGE, LyingServer, lying_server
from tests.support.log_records import open_log
from tests.support.s3_server import CREDENTIALS
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.connectors.files.listing import listed_files
from tiered_index.errors import StorageMisconfigured
from tiered_index.format.names import new_file_id
from tiered_index.service.jobs.copying import copy_index
from tiered_index.service.jobs.orphans import find_orphans
from tiered_index.storage import obstores
from tiered_index.storage.base import Storage, list_whole
from tiered_index.storage.opening import child_storages, open_storage

Place: TypeAlias = tuple[str, str]
NAMES = [f"o{number:02d}" for number in range(17)]


@pytest.fixture(scope="module")
def running() -> Iterator[LyingServer]:
    with lying_server() as server:
        yield server


@pytest.fixture
def lying(running: LyingServer, monkeypatch: pytest.MonkeyPatch) -> LyingServer:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    running.lies.clear()
    running.lists.clear()
    return running


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def place(lying: LyingServer, request: pytest.FixtureRequest) -> Place:
    """The name of an empty bucket, and its parameters."""
    client = f"&client={request.param}" if request.param else ""
    return f"bucket-{uuid.uuid4().hex}", f"?endpoint_url={lying.endpoint_url}{client}"


def opened(place: Place, prefix: str) -> Storage:
    return open_storage(f"s3://{f'/{prefix}'.join(place)}")


@pytest.mark.parametrize("lies", [(), ("no token",), ("no start-after",)], ids=" and ".join)
@pytest.mark.parametrize("start_after", ["", "o03", "o16"])
def test_a_list_is_whole_although_pages_end_early(
    lying: LyingServer, place: Place, lies: Sequence[str], start_after: str
) -> None:
    lying.fill(f"{place[0]}/logs", NAMES)
    lying.lies.update(lies)
    expected = [name for name in NAMES if name > start_after]
    with opened(place, "logs") as storage:
        assert [info.name for info in list_whole(storage, start_after=start_after)] == expected
        first = [info.name for info in list_whole(storage, "o0", start_after=start_after)]
        assert first == [name for name in expected if name < "o1"]


@pytest.mark.parametrize("lies", [("no token", "no start-after"), ("same token",)], ids=" and ".join)
def test_a_list_whose_names_do_not_grow_is_an_error_that_names_the_storage(
    lying: LyingServer, place: Place, lies: Sequence[str]
) -> None:
    lying.fill(f"{place[0]}/logs", NAMES)
    lying.lies.update(lies)
    with opened(place, "logs") as storage:
        with pytest.raises(StorageMisconfigured, match=rf"{place[0]}/logs.*(order of name|goes on after)"):
            list(list_whole(storage))
        assert len(lying.lists) < 12


def test_no_client_asks_for_the_same_token_for_ever(
    lying: LyingServer, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstores, "_LONGEST_PAGE_S", 0.5)
    lying.fill(f"{place[0]}/logs", NAMES)
    lying.lies |= {"same token", "no objects"}
    with opened(place, "logs") as storage:
        # boto3 lists what obstore can't
        with pytest.raises(StorageMisconfigured, match="goes on after 'logs/o02' without a name or a new Next"):
            list(storage.list())
        lists = len(lying.lists)
        # no client has gone on
        lying.lies.clear()
        assert [info.name for info in storage.list()] == NAMES
        assert len(lying.lists) <= lists + 7


def test_a_list_without_news_costs_one_request(lying: LyingServer, place: Place) -> None:
    lying.fill(f"{place[0]}/logs", NAMES)
    with opened(place, "logs") as storage:
        further = int(storage.may_end_lists_early)
        for start_after, known, lists in (("o16", "", 1), ("o15", "o16", 1), ("o15", "", 1 + further)):
            lying.lists.clear()
            expected = [name for name in NAMES if name > start_after]
            assert [info.name for info in list_whole(storage, start_after=start_after, known=known)] == expected
            assert len(lying.lists) == lists


def test_sources_indexes_readers_and_jobs_see_all_objects(lying: LyingServer, place: Place, tmp_path: Path) -> None:
    lying.lies.add("no token")
    lying.fill(f"{place[0]}/logs/a", NAMES)
    config = IndexConfig(storage=opened(place, "indexes/1").uri, root=tmp_path / "root")
    for source in ("logs/a/", "logs/a/o*", "**"):
        with listed_files([f"s3://{place[0]}/{source}"], config) as files:
            assert [file.uri.rpartition("/")[2] for file in files] == NAMES
    puts = list(range(2 * PAGE + 1))
    newest = puts[::-1]
    with IndexService.open(config) as index, IndexReader.open(str(config.storage)) as reader:
        for number in puts:
            index.put("t", 0, ["k"], number, 1, 1_700_000_000_000 + number * 1000)
            index.seal()
            index.run_lifecycle()
        reader.refresh()
        assert [item.offset for item in reader.query("t", "k")] == newest
        stored, lists = index.log_state.objects, len(lying.lists)
        reader.refresh()
        assert len(lying.lists) == lists + 1
    for name in [name for name in lying.objects if "/checkpoint/" in name]:
        del lying.objects[name]
    with IndexReader.open(str(config.storage)) as reader:
        assert [item.offset for item in reader.query("t", "k")] == newest
    copy_index(str(config.storage), opened(place, "indexes/2").uri)
    _, _, attempt = next(iter(stored)).split("/")
    strays = [f"data/{new_file_id(number)}/{attempt}" for number in puts]
    lying.fill(f"{place[0]}/indexes/1", strays, changed_s=1.0)
    with opened(place, "indexes/1") as storage:
        assert [info.name for info in find_orphans(storage, open_log(storage)).objects] == strays
    for number in puts:
        lying.fill(f"{place[0]}/indexes/{number + 3}", ["log/x"])
    with opened(place, "indexes") as storage:
        assert len(list(child_storages(storage))) == len(puts) + 2
    with IndexReader.open(opened(place, "indexes/2").uri) as reader:
        assert [item.offset for item in reader.query("t", "k")] == newest
