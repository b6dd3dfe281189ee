"""A reader of a root that has not changed answers from a view of its files, as by a look at the root."""

import errno
import os
import time

import pytest

from tests.support.core import compiled_core, using
from tests.support.rounds import upload
from tests.unit.service.test_plain_lookups import ASKED, KEYS, T_MS, TOPICS, outcome
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile, IndexClosed, TieredIndexError
from tiered_index.format.names import JOURNAL_SUFFIX
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.tombstones import Tombstone
from tiered_index.service.read.files import root_view
from tiered_index.service.read.files.root_view import states_of


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch):
    compiled_core()
    monkeypatch.setattr(root_view, "STEP_NS", 20_000_000)


@pytest.fixture
def reading(index, tmp_path, storage, clock):
    """Return a reader of the index's root."""
    with IndexReader.open(
        root=tmp_path / "root", storage_backend=storage, clock=clock, environment=False, query_threads=2
    ) as reader:
        yield reader


@pytest.fixture
def index(request, open_index):
    service = open_index("root", slots=50, items=4_000, **getattr(request, "param", {}))
    put(service, 0)
    return service


FILES_LEAVE = pytest.mark.parametrize("index", [{"local_keep_s": 0}], indirect=True, ids=[""])


def put(index, part, keys=KEYS):
    for number, (topic, key) in enumerate([(topic, key) for topic in TOPICS for key in keys]):
        for more in range(3):
            offset = 1_000_000 * part + 10 * number + more
            index.put(topic, part, key, offset, 1 + more, T_MS + 1_000 * offset)
    index.flush()


def settle(reader):
    """Wait until a later change of a folder would change its time, then look."""
    time.sleep(0.05)
    for _ in range(2):
        reader.query("t", "k")


def by_core(reader):
    """The number of answers that were one call of the core."""
    return reader._engine.plain.complete + reader._engine.plain.truncated


LIVES = {"unsealed": [], "sealed": ["seal"], "uploaded": ["upload"], "uploaded, and unsealed again": ["upload", "put"]}


@pytest.mark.parametrize("life", LIVES)
def test_each_answer_is_that_of_the_reference(index, reading, life):
    for step in LIVES[life]:
        if step == "seal":
            index.seal()
        elif step == "upload":
            upload(index)
        else:
            put(index, 1)
    settle(reading)
    core, before = compiled_core(), by_core(reading)
    for arguments in ASKED:
        with using(core):
            of_core = outcome(reading, arguments)
        with using(None):
            assert of_core == outcome(reading, arguments), arguments
    # the core leaves unusual texts and numbers to the reference
    assert by_core(reading) - before > len(KEYS)


@FILES_LEAVE
def test_files_that_left_the_root_are_read_from_the_storage(index, reading):
    settle(reading)
    before = by_core(reading)
    assert len(reading.query("t", "k")) == 3 and by_core(reading) == before + 1
    upload(index, rounds=2)
    put(index, 1, ["other"])
    assert len(reading.query("t", "k")) == 3
    settle(reading)
    before = by_core(reading)
    assert (len(reading.query("t", "k")), len(reading.query("t", "other"))) == (3, 3)
    assert by_core(reading) == before + 2


def test_each_change_is_seen_by_the_next_lookup(index, reading):
    for number in range(8):
        settle(reading)
        before = by_core(reading)
        assert len(reading.query("t", "k")) == 3 + number and by_core(reading) == before + 1
        index.put("t", 0, "k", 5_000_000 + number, 1, T_MS)
        index.flush()
        assert len(reading.query("t", "k")) == 4 + number
        if number % 3 == 1:
            index.seal()
            assert len(reading.query("t", "k")) == 4 + number
        if number % 3 == 2:
            upload(index)
            assert len(reading.query("t", "k")) == 4 + number


def test_a_lookup_of_another_time_does_not_verify_an_unsealed_file(index, reading):
    """The lookup that needs it does, and later ones find it in the view."""
    index.seal()
    index.run_lifecycle()
    late_ms = T_MS + 10**11
    index.put("t", 0, "late", 9_000_000, 1, late_ms)
    index.flush()
    time.sleep(0.05)
    for _ in range(2):
        reading.query("t", "k", None, late_ms - 1)
    before = by_core(reading)
    assert len(reading.query("t", "k", None, late_ms - 1)) == 3 and by_core(reading) == before + 1
    (growing,) = [file for file in reading.files() if file.place == "unsealed"]
    assert not growing.is_loaded
    assert len(reading.query("t", "late")) == 1 and by_core(reading) == before + 1 and growing.is_loaded
    assert len(reading.query("t", "late")) == 1 and by_core(reading) == before + 2


def test_damage_and_loss_fail_lookups_after_answers_from_a_view(index, reading, tmp_path):
    index.seal()
    settle(reading)
    index.abandon()
    before = by_core(reading)
    assert len(reading.query("t", "k")) == 3 and by_core(reading) == before + 1
    (path,) = (tmp_path / "root" / "unsealed").glob(f"*{JOURNAL_SUFFIX}")
    journal = path.read_bytes()
    middle = len(journal) // 2
    path.write_bytes(journal[:middle] + bytes([journal[middle] ^ 1]) + journal[middle + 1 :])
    for _ in range(2):
        with pytest.raises(CorruptFile):
            reading.query("t", "k")
        time.sleep(0.05)
    path.write_bytes(journal)
    settle(reading)
    before = by_core(reading)
    assert len(reading.query("t", "k")) == 3 and by_core(reading) == before + 1
    (tmp_path / "root" / "uploaded").rmdir()
    with pytest.raises(TieredIndexError):
        reading.query("t", "k")


def test_a_closed_reader_refuses_lookups(index, reading):
    settle(reading)
    before = by_core(reading)
    reading.query("t", "k")
    assert by_core(reading) == before + 1
    reading.close()
    with pytest.raises(IndexClosed):
        reading.query("t", "k")


@FILES_LEAVE
def test_a_view_keeps_no_file_that_left_the_root(index, reading):
    index.seal()
    settle(reading)
    reading.query("t", "k")
    upload(index, rounds=2)
    # this looks again, but takes no view
    assert len(reading.query_many([("t", "k")])[0]) == 3
    assert reading._views[0].catalog.snapshot.present_view is None


def test_the_states_of_files_are_those_of_the_reference(tmp_path):
    core, root = compiled_core(), tmp_path / "root"
    for name in ("folder", "elsewhere"):
        (root / name).mkdir(parents=True)
    (root / "file").write_bytes(b"text")
    (root / "link").symlink_to("file")
    (root / "dangling").symlink_to("nothing")
    (tmp_path / "other name").symlink_to("root")
    tops = [tmp_path / "other name", *(root / name for name in ("folder", "elsewhere", "link", "dangling"))]
    files = [root / name for name in ("file", "link", "dangling", "nothing", "folder")]
    paths = tuple(map(os.fsencode, [*tops, *files]))
    states = core.file_states(paths, len(tops))
    assert states == states_of(paths, len(tops)) and len(states) == 32 * len(paths)
    assert states[32 * 7 : 32 * 9] == bytes(64), "files that are not there"
    (root / "file").write_bytes(b"longer text")
    assert core.file_states(paths, len(tops)) == states_of(paths, len(tops)) != states
    # what is to be told as an error is left to the reference
    for wrong, folders in (((b"/nowhere",), 1), ((paths[0], os.fsencode(root / "file" / "below")), 1)):
        assert core.file_states((*wrong, *wrong), folders) is None
        with pytest.raises(OSError) as failed:
            states_of((*wrong, *wrong), folders)
        assert failed.value.errno in (errno.ENOENT, errno.ENOTDIR)
    assert core.file_states(paths[5:6] * 64, 0) == states_of(paths[5:6] * 64, 0)
    assert core.file_states(paths[5:6] * 65, 0) is None
    for wrong in (("text",), (None,), [b"list"]):
        with pytest.raises(TypeError):
            core.file_states(wrong, 0)


def test_a_record_that_only_hides_entries_counts_for_the_same_files(index, reading):
    upload(index)
    settle(reading)
    plain = by_core(reading)
    assert len(reading.query("t", "k")) == 3 and by_core(reading) > plain
    stone = Tombstone.of("t", T_MS + (1 << 40), key="k")
    index._session.log.append(
        "a tombstone", None, lambda _: LogRecord(0, "erase", 0, "", 0, expired=Expired(tombstones=(stone,)))
    )
    reading.refresh()
    for _ in range(3):
        plain = by_core(reading)
        assert len(reading.query("t", "k")) == 0 < len(reading.query("t", KEYS[1]))
    assert by_core(reading) > plain, "by the view of the same files"
