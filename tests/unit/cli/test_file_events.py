"""What happens to files of a log between two runs: each row of them is found once, or the answer says why not."""

import gzip
import io
import json
import os
import random
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.support.file_logs import BEGIN_S, KEYS, TABLES, Logs, once
from tiered_index import FileRows, IndexReader, IndexService
from tiered_index.connectors.files.listing import listed_files
from tiered_index.connectors.files.rows import restart
from tiered_index.connectors.files.rows import table as rows_of_table
from tiered_index.connectors.files.rows import text as rows_of_text

FORMS = ("ndjson", "csv", "gz", "zst", "parquet", "arrow")
TEXTS = ("ndjson", "csv", "gz", "zst")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(rows_of_text, "SUM_BYTES", 256)


def both(test):
    places = pytest.mark.parametrize("where", ["folder", "bucket"])
    return places(test)


@pytest.fixture
def logs(tmp_path, where, form):
    return Logs(tmp_path, where, form)


@both
@pytest.mark.parametrize("form", FORMS)
def test_the_same_content_is_the_same_file_and_is_not_read_again(logs):
    logs.write("app.log", logs.rows(*range(40)))
    assert logs.ingest().rows == 40
    if logs.is_local:
        os.utime(logs.folder / "app.log", (BEGIN_S, BEGIN_S))
        assert (logs.ingest().rows, logs.found()) == (0, (once(range(40)), 0))
        shutil.copyfile(logs.folder / "app.log", logs.folder / "new")
        (logs.folder / "new").replace(logs.folder / "app.log")
    else:
        logs.write("app.log", logs.read("app.log"))
    # also before a run has seen it
    assert logs.found() == (once(range(40)), 0)
    counts = logs.ingest()
    assert (counts.rows, counts.known, counts.changed, counts.rewritten) == (0, 1, [], [])
    assert logs.found() == (once(range(40)), 0)


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_text_that_has_grown_is_continued(logs):
    logs.write("app.log", logs.rows(*range(30)))
    logs.ingest()
    for begin in (30, 50):
        logs.write("app.log", logs.read("app.log") + logs.rows(*range(begin, begin + 20), begin=False))
        assert logs.ingest().rows == 20
    assert logs.found() == (once(range(70)), 0)
    assert logs.ingest().known == 1


@both
@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_behind_an_edit_are_read_anew_and_those_before_it_keep_their_places(logs, shift):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    edited = [*range(25), 1025, *range(26 + shift, 40)]
    logs.write("app.log", logs.rows(*edited))
    counts = logs.ingest()
    assert 15 - shift <= counts.rows < 40 and len(counts.rewritten) == 1
    assert logs.found() == (once(edited), 0)
    again = logs.ingest()
    assert (again.rows, again.known) == (0, 1)
    # and once more before the first edit, and behind the end
    edited[18] = 1018
    logs.write("app.log", logs.rows(*edited))
    logs.ingest()
    assert logs.found() == (once(edited), 0)


@both
@pytest.mark.parametrize("form", ["gz"])
def test_a_packed_text_that_is_damaged_behind_an_edit_is_still_the_same_log(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest(archive=True)
    edited = [*range(35), 1035, *range(36, 40)]
    # all rows can be read, but not the end of the member
    logs.write("app.log", logs.rows(*edited)[:-4])
    counts = logs.ingest(archive=True)
    assert (counts.changed, len(counts.rewritten), counts.damaged) == ([], 1, 1)
    assert logs.found() == (once(edited, [35]), 0)


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_text_with_another_begin_is_another_log_and_no_old_row_is_shown_for_it(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    edited = [1000, *range(1, 40)]
    logs.write("app.log", logs.rows(*edited))
    assert len(logs.ingest().changed) == 1
    assert logs.found() == (once(edited), 40)
    # the first text again, elsewhere
    logs.write("old/other", logs.rows(*range(40)))
    logs.ingest()
    assert logs.found() == (once(edited) + once(range(40)), 0)


@both
@pytest.mark.parametrize("form", TABLES)
def test_a_table_with_other_content_replaces_the_rows_of_its_name(logs):
    logs.write("a.parquet", logs.rows(*range(40)))
    logs.ingest()
    logs.write("a.parquet", logs.rows(*range(1, 41)))
    assert (logs.ingest().rows, logs.found()) == (40, (once(range(1, 41)), 0))
    logs.write("a.parquet", logs.rows(*range(40)))
    assert (logs.ingest().rows, logs.found()) == (40, (once(range(40)), 0))


def large_table(keys, form):
    """Return a file of three row groups or batches, whose rows have these keys, in one place with the same length."""
    file, numbers = io.BytesIO(), range(len(keys))
    texts = {"n": [f"{n:04}" for n in numbers], "pad": [f"{n:0100}" for n in numbers]}
    table = pa.table({"k": keys, "at": [BEGIN_S + n for n in numbers]} | texts)
    if form == "parquet":
        plain = {"use_dictionary": False, "compression": "NONE", "write_statistics": False}
        pq.write_table(table, file, row_group_size=2000, **plain)
    else:
        with pa.ipc.new_file(file, table.schema) as sink:
            sink.write_table(table, 2000)
    return file.getvalue()


@both
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_row_of_a_table_that_was_changed_at_the_same_length_is_noticed(logs, monkeypatch):
    """Before a run sees it, rows of its row group have changed; the others come back."""
    monkeypatch.setattr(rows_of_table, "SUM_BYTES", 4096)
    keys = ["b"] * 6000
    for n in range(0, 6000, 500):
        keys[n] = "a"
    before = large_table(keys, logs.form)
    keys[3501], keys[3500] = "a", "b"
    after = large_table(keys, logs.form)
    assert len(before) == len(after) and (before[: 1 << 16], before[-1 << 16 :]) == (
        after[: 1 << 16],
        after[-1 << 16 :],
    )
    logs.write("a.table", before)
    logs.ingest()
    assert logs.found() == (once(range(0, 6000, 500)), 0)
    logs.write("a.table", after)
    shown, changed = logs.found()
    if logs.is_local or logs.form == "parquet":
        assert (shown, changed) == (once(range(0, 2000, 500), range(4000, 6000, 500)), 4)
    else:
        # the headers of batches are read by 1 MiB
        assert (shown, changed) == (once(), 12)
    counts = logs.ingest()
    assert (counts.rows, len(counts.rewritten)) == (6000, 1)
    assert logs.found() == (once(range(0, 3500, 500), [3501], range(4000, 6000, 500)), 0)
    logs.write("a.table", after[:-1])
    assert logs.found()[0].total() == 0


@both
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["app.log.1", "elsewhere/app.log", "elsewhere/other"])
def test_a_file_that_has_moved_keeps_its_rows(logs, name):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    logs.move("app.log", name)
    logs.write("app.log", logs.rows(*range(40, 70)))
    assert (logs.ingest().rows, logs.found()) == (30, (once(range(70)), 0))


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_copy_beside_a_log_is_not_indexed_and_has_its_rows_when_it_is_truncated(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    logs.write("app.log.1", logs.read("app.log"))
    counts = logs.ingest()
    assert (counts.rows, len(counts.copies), logs.found()) == (0, 1, (once(range(40)), 0))
    logs.write("app.log", logs.rows(*range(40, 45)))
    assert (logs.ingest().rows, logs.found()) == (5, (once(range(45)), 0))


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_copy_that_is_new_with_its_log_is_indexed_once(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.write("app.log.1", logs.read("app.log"))
    assert (logs.ingest().rows, logs.found()) == (40, (once(range(40)), 0))


@both
@pytest.mark.parametrize("form", FORMS)
def test_the_same_content_under_two_names_is_two_files(logs):
    logs.write("a/app.log", logs.rows(*range(40)))
    logs.write("b/app.log", logs.read("a/app.log"))
    assert (logs.ingest().rows, logs.found()) == (80, (once(range(40), range(40)), 0))
    logs.write("c/app.log", logs.read("a/app.log"))
    assert logs.ingest().rows == 40


@both
@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_a_log_that_is_packed_keeps_its_rows(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    packed = gzip.compress(logs.read("app.log"))
    logs.write("app.log.1.gz", packed)
    # while both are there
    assert (logs.ingest().rows, logs.found()) == (0, (once(range(40)), 0))
    logs.delete("app.log")
    assert (logs.ingest().rows, logs.found()) == (0, (once(range(40)), 0))
    logs.write("app.log.1.gz", gzip.compress(gzip.decompress(packed), 1))
    assert (logs.ingest().rows, logs.found()) == (0, (once(range(40)), 0))


@both
@pytest.mark.parametrize("form", TEXTS)
def test_rows_with_copies_stay_answers_and_count_once(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest(archive=True)
    edited = [*range(25), 1025, *range(26, 40)]
    logs.write("app.log", logs.rows(*edited))
    logs.ingest(archive=True)
    # the row that is not in the file any more has its copy
    assert logs.found() == (once([*edited, 25]), 0)


@both
@pytest.mark.parametrize("form", FORMS)
def test_rows_with_copies_count_once_after_further_edits_kills_and_from_the_archive_alone(logs, tmp_path):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest(archive=True)
    rows, gone = [*range(40)], []
    for at, puts in ((25, None), (30, 1), (35, 2), (27, None)):
        gone.append(rows[at])
        rows[at] += 1000
        logs.write("app.log", logs.rows(*rows))
        if puts is not None:
            logs.killed(puts=puts, archive=True)
        logs.ingest(archive=True)
        assert logs.found() == (once([*rows, *gone]), 0)
    logs.delete("app.log")
    new = logs.config.changed(root=tmp_path / "new", storage=f"file://{tmp_path}/new-objects")
    done = run_here("ingest", f"archive:{logs.config.storage}", "--root", new.root, "--storage", new.storage, "--wait")
    assert done.code == 0, done.err
    logs.config = new
    assert logs.found()[0] == once([*rows, *gone])


@both
@pytest.mark.parametrize("form", FORMS)
def test_rows_whose_copies_are_erased_count_once_after_edits(logs):
    logs.write("app.log", text := logs.rows(*range(40)))
    logs.ingest(archive=True)
    logs.erase("e0")
    assert logs.found() == (once(range(40)), 0)
    # row 30 is gone, and has no copy, row 26 has one
    edited = [*range(26), 1026, *range(27, 30), 1030, *range(31, 40)]
    logs.write("app.log", logs.rows(*edited))
    logs.ingest(archive=True)
    assert logs.found() == (once(edited, [26]), 0)
    logs.write("app.log", text)
    logs.ingest(archive=True)
    assert logs.found() == (once(range(40), [1026, 1030]), 0)


@both
@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_comes_back_after_its_copy_was_erased_counts_once(logs):
    logs.write("app.log", text := logs.rows(*range(40)))
    logs.ingest(archive=True)
    edited = [*range(25), 1026, *range(26, 40)]
    logs.write("app.log", logs.rows(*edited))
    logs.ingest(archive=True)
    assert logs.found() == (once(edited, [25]), 0)
    logs.erase("e0")
    # no file has it, and no copy; those that were left out are said to be missing, if they lie elsewhere now
    shown, missing = logs.found()
    assert not shown - once(edited) and shown.total() + missing == len(edited) + 1
    logs.write("app.log", text)
    for _ in range(2):
        logs.ingest(archive=True)
        assert logs.found() == (once(range(40), [1026]), 0)


@both
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("archive", [False, True])
def test_rows_of_a_killed_run_count_once_if_the_file_is_written_anew_while_they_are_looked_for(logs, archive):
    logs.write("app.log", logs.rows(*range(20)))
    logs.ingest(archive=archive)
    rows = (
        logs.rows(*range(40)) if logs.form in TABLES else logs.read("app.log") + logs.rows(*range(20, 40), begin=False)
    )
    logs.write("app.log", rows)
    logs.killed(links=2, archive=archive)

    def change(files):
        logs.write("new", rows)
        logs.move("new", "app.log")
        return files

    logs.killed(files=change, archive=archive)
    logs.ingest(archive=archive)
    assert logs.found() == (once(range(40)), 0)


@both
@pytest.mark.parametrize("form", ["ndjson", "gz", "parquet", "arrow"])
def test_the_new_rows_of_a_killed_second_reading_are_answers_after_the_run_that_ends_it(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    edited = [*range(35), 1035, *range(36, 40)]
    logs.write("app.log", logs.rows(*edited))
    logs.killed(puts=0)
    with IndexService(logs.config) as index, logs.listed() as files:
        logs.linker(index).run(files)
    assert logs.found() == (once(edited), 0)


@both
@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("puts", [0, 1])
@pytest.mark.parametrize("form", ["ndjson", "gz", "parquet"])
def test_an_old_content_that_is_restored_after_an_edit_that_was_not_read_counts_once(logs, puts, is_gone, monkeypatch):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    logs.write("app.log", logs.rows(*range(20)))
    logs.ingest()
    # the edit replaces two segments
    rows = (
        logs.rows(*range(40)) if logs.form in TABLES else logs.read("app.log") + logs.rows(*range(20, 40), begin=False)
    )
    logs.write("app.log", rows)
    logs.ingest()
    aside = logs.folder.parent / "aside"
    if logs.is_local:
        # with its inode and its time
        (logs.folder / "app.log").rename(aside)
    logs.write("app.log", logs.rows(*range(12), 1012, *range(13, 40)))
    logs.killed(puts=puts)
    if is_gone:
        logs.delete("app.log")
    else:
        logs.write("app.log", logs.rows(*range(100, 110)))
    logs.write("b.log", logs.rows(*range(50, 60)))
    logs.ingest()
    if logs.is_local:
        aside.rename(logs.folder / "app.log")
    else:
        logs.write("app.log", rows)
    for _ in range(2):
        logs.ingest()
        shown, missing = logs.found()
        # those of another log in its place are said to be gone
        assert (shown, missing > 0) == (once(range(40), range(50, 60)), not is_gone and logs.form not in TABLES)
    for number in range(KEYS):
        assert logs.found(f"e{number}")[0] == once([n for n in (*range(40), *range(50, 60)) if n % KEYS == number])


@both
@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("form", ["gz", "zst", "arrow"])
def test_a_file_that_a_killed_run_has_begun_is_found_where_it_has_moved(logs, monkeypatch, archive):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    logs.write("app.log", logs.rows(*range(40)))
    logs.killed(puts=6, archive=archive)
    logs.move("app.log", "elsewhere/other")
    if logs.is_local:
        logs.write("elsewhere/new", logs.read("elsewhere/other"))
        logs.move("elsewhere/new", "elsewhere/other")
    logs.ingest(archive=archive)
    assert logs.found() == (once(range(40)), 0)


@both
@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_while_a_later_run_ends_a_reading_is_read(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.killed(links=1)
    edited = [*range(11, 51)]

    def change(files):
        logs.write("app.log", logs.rows(*edited))
        return files

    logs.killed(files=change)
    logs.ingest()
    assert logs.found()[0] == once(edited)
    for number in range(KEYS):
        assert logs.found(f"e{number}")[0] == once([n for n in edited if n % KEYS == number])


@pytest.mark.parametrize("where", ["folder"])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_was_begun_and_is_another_one_now_stops_no_run(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.killed(puts=6)
    logs.write("b.log", logs.rows(*range(50, 60)))

    def change(files):
        logs.write("new", logs.rows(*range(40)))
        logs.move("new", "app.log")
        return files

    with IndexService(logs.config) as index, logs.listed() as files:
        logs.linker(index).run(change(files))
    logs.ingest()
    assert logs.found()[0] == once(range(40), range(50, 60))


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_log_that_is_restored_beside_its_copy_counts_once(logs):
    logs.write("app.log", text := logs.rows(*range(40)))
    logs.ingest()
    logs.write("app.log.1", text)
    logs.write("app.log", logs.rows(*range(100, 110)))
    logs.ingest()
    logs.write("app.log", text)
    counts = logs.ingest()
    assert (counts.rows, len(counts.copies)) == (0, 1)
    assert logs.found() == (once(range(40)), 10)
    logs.write("app.log", text + logs.rows(*range(40, 60), begin=False))
    assert logs.ingest().rows == 20
    assert logs.found() == (once(range(60)), 10)
    # an edit of the copy makes it another log
    logs.write("app.log.1", logs.rows(*range(25), 1025, *range(26, 40)))
    logs.ingest()
    assert logs.found()[0] == once(range(60), [*range(25), 1025, *range(26, 40)])


@both
@pytest.mark.parametrize("form", TEXTS)
def test_the_file_with_all_known_rows_is_the_one_that_has_moved(logs):
    logs.write("app.log", text := logs.rows(*range(20)))
    logs.ingest()
    logs.write("app.log.1", text)
    logs.write("app.log", text + logs.rows(*range(20, 40), begin=False))
    logs.ingest()
    logs.move("app.log", "app.log.2")
    logs.write("app.log", logs.rows(*range(40, 45)))
    logs.ingest()
    assert logs.found() == (once(range(45)), 0)


@both
@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("archive", [False, True])
def test_a_log_that_begins_as_the_one_before_takes_no_rows_of_that(logs, archive):
    logs.write("app.log", first := logs.rows(0))
    logs.ingest(archive=archive)
    logs.write("app.log", text := first + logs.rows(*range(1, 40), begin=False))
    logs.ingest(archive=archive)
    logs.write("app.log.1", text)
    for rows in ([], [*range(50, 60)]):
        logs.write("app.log", first + logs.rows(*rows, begin=False) if rows else first)
        for _ in range(2):
            counts = logs.ingest(archive=archive)
            assert (counts.rewritten, counts.changed) == ([], [])
            assert logs.found() == (once(range(40), [0, *rows] if rows else []), 0)


@pytest.mark.parametrize(
    ("where", "backup"), [("folder", "app.log.bak"), ("bucket", "app.log.bak"), ("folder", "app.log~")]
)
@pytest.mark.parametrize("form", TEXTS)
def test_a_backup_of_a_log_that_was_edited_since_is_no_further_log(logs, backup):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    logs.write(backup, logs.read("app.log"))
    edited = [*range(12), 1012, *range(13, 30)]
    for more in ([], [], [*range(50, 80)]):
        logs.write("app.log", logs.rows(*edited, *more))
        assert [uri.rpartition("/")[2] for uri in logs.ingest().copies] == [backup]
        assert logs.found() == (once(edited, more), 0)


@pytest.mark.parametrize("where", ["folder"])
@pytest.mark.parametrize("form", TEXTS)
def test_a_copy_of_an_edited_log_with_the_inode_that_this_had_is_no_log(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    edited = [*range(25), 1025, *range(26, 40)]
    logs.move("app.log", "app.log.2")
    for name in ("app.log.2", "app.log"):
        logs.write(name, logs.rows(*edited))
    for _ in range(2):
        assert len(logs.ingest().copies) == 1
        assert logs.found() == (once(edited), 0)


@both
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_known", [True, False])
def test_copies_of_a_rotated_log_are_indexed_once(logs, is_known):
    logs.write("app.log", text := logs.rows(*range(40)))
    if is_known:
        logs.ingest()
    logs.write("app.log.bak", text)
    if is_known:
        assert len(logs.ingest().copies) == 1
    logs.move("app.log", "app.log.2")
    logs.write("app.log.3.gz.1", text)
    logs.write("app.log", logs.rows(*range(40, 60)))
    for _ in range(2):
        assert [uri.rpartition("/")[2] for uri in sorted(logs.ingest().copies)] == ["app.log.3.gz.1", "app.log.bak"]
        assert logs.found() == (once(range(60)), 0)


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_log_of_several_readings_comes_back_as_a_whole(logs):
    logs.write("app.log", logs.rows(*range(20)))
    logs.ingest()
    logs.write("app.log", text := logs.read("app.log") + logs.rows(*range(20, 40), begin=False))
    logs.ingest()
    logs.write("app.log", logs.rows(*range(100, 110)))
    logs.ingest()
    logs.write("app.log", text)
    logs.ingest()
    assert logs.found() == (once(range(40)), 10)


@both
@pytest.mark.parametrize("form", TABLES)
def test_a_table_that_gets_the_name_of_a_replaced_one_keeps_its_rows(logs):
    logs.write("a", logs.rows(*range(20)))
    logs.write("b", logs.rows(*range(20, 50)))
    logs.ingest()
    logs.write("b", logs.rows(*range(50, 70)))
    logs.ingest()
    logs.move("a", "b")
    logs.ingest()
    assert logs.found() == (once(range(20)), 0)
    # also for a run that reads the log again, and for the table that was there before
    logs.write("b", logs.rows(*range(50, 70)))
    logs.write("c", logs.rows(*range(20)))
    logs.ingest()
    assert logs.found() == (once(range(20), range(50, 70)), 0)


@both
@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_a_packed_copy_is_no_file_that_has_moved_from_elsewhere(logs):
    logs.write("a/app.log", logs.rows(*range(40)))
    logs.write("b/app.log", logs.read("a/app.log"))
    logs.ingest()
    logs.delete("a/app.log")
    logs.write("b/app.log.gz", gzip.compress(logs.read("b/app.log")))
    logs.ingest()
    assert logs.found() == (once(range(40)), 40)


@pytest.mark.parametrize("where", ["bucket"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [range(20), range(100, 300)])
def test_a_list_with_an_old_size_changes_nothing(logs, before):
    """The file has grown since, or begun anew."""
    logs.write("app.log", logs.rows(*before))
    with listed_files([logs.uri], logs.config) as files:
        (old,) = files
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    with IndexService(logs.config) as index, logs.bucket():
        linker = logs.linker(index)
        with listed_files([logs.uri], logs.config) as files:
            stale = [replace(old, file=replace(old.file, storage=files[0].file.storage))]
            counts = linker.run(stale)
    assert (counts.rows, counts.known, counts.rewritten, logs.found()) == (0, 1, [], (once(range(40)), 0))


@pytest.mark.parametrize("where", ["folder"])
@pytest.mark.parametrize("form", ["ndjson"])
def test_a_row_with_a_byte_that_is_not_utf_8_elsewhere_is_shown_with_escapes(logs):
    logs.write("app.log", b'{"k": "a", "at": 1700000000, "n": "7", "note": "caf\xe9"}\n')
    assert logs.ingest().rows == 1
    with IndexReader.open(config=logs.config) as reader, FileRows(reader) as of_files:
        (answer,) = reader.messages("t", "a", source=of_files)
    assert json.loads(answer.message.text)["note"] == r"caf\xe9"


@both
@pytest.mark.parametrize("form", ["ndjson"])
def test_a_late_row_of_a_log_that_was_packed_is_read_from_a_restart_point(logs, monkeypatch):
    monkeypatch.setattr(restart, "SPACING_BYTES", 64 << 10)
    monkeypatch.setattr(restart, "_EARLY_BYTES", 32 << 10)
    moments = random.Random(1)
    rows = [{"k": "a", "at": BEGIN_S + n, "n": f"{n:04}", "r": f"{moments.getrandbits(800):x}"} for n in range(3000)]
    lines = [f"{json.dumps(row)}\n".encode() for row in rows]
    text = b"".join(lines)
    for written in (b"".join(lines[:1000]), text):
        logs.write("app.log", written)
        logs.ingest()
    logs.write("app.log.1.gz", gzip.compress(text))
    logs.delete("app.log")
    assert logs.ingest().rows == 0
    read, of_text = [], restart.RestartedText.read

    def counted(self, size):
        data = of_text(self, size)
        read.append(len(data))
        return data

    monkeypatch.setattr(restart.RestartedText, "read", counted)
    with IndexReader.open(config=logs.config) as reader, FileRows(reader) as of_files:
        fetched_rows = list(reader.messages("t", "a", source=of_files, max_count=10))
        assert [int(json.loads(each.message.text)["n"]) for each in fetched_rows] == [*range(2999, 2989, -1)]
    assert 0 < sum(read) < len(fetched_rows) * len(text) / 2
