"""Defects between put and file: back-pressure, flushes, lanes, positions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

BUFFER = "tests/unit/service/test_buffer_flush_catalog.py"
FULL = "tests/faults/test_full_disk.py"
CRASHES = "tests/reliability/test_crashes.py::test_every_crash[writing]"

MUTANTS = (
    Mutant(
        "buffer-accepts-in-part",
        "a call that is pushed back leaves its entries in the buffer",
        "service/writing/buffer.py",
        '        self._admit(len(columns["second"]), size_bytes)\n',
        '        self._append(Chunk(self._newest + 1, len(columns["second"]), size_bytes, dict(positions), columns), '
        "self._open)\n"
        '        self._admit(len(columns["second"]), size_bytes)\n',
        (f"{BUFFER}::test_a_call_beyond_the_buffers_bound_is_refused_whole",),
    ),
    Mutant(
        "buffer-bound-passed",
        "a call is taken as long as the bound is not reached before it",
        "service/writing/buffer.py",
        "held + entries > self._max_entries",
        "held > self._max_entries",
        (f"{BUFFER}::test_a_call_beyond_the_buffers_bound_is_refused_whole",),
    ),
    Mutant(
        "buffer-bytes-unbounded",
        "the bound in bytes is not looked at",
        "service/writing/buffer.py",
        " or held_bytes + size_bytes > self._max_bytes",
        "",
        (f"{BUFFER}::test_the_bound_in_bytes",),
    ),
    Mutant(
        "buffer-merge-forgets-positions",
        "positions are lost where small chunks are merged",
        "service/writing/buffer.py",
        "max_positions(self.positions, newer.positions)",
        "newer.positions",
        (f"{BUFFER}::test_merged_chunks_keep_the_positions_of_both",),
    ),
    Mutant(
        "positions-go-back",
        "a source's position goes back with a smaller one",
        "service/log/records.py",
        "max(position, first.get(source, position)) for source",
        "position for source",
        (f"{BUFFER}::test_positions_never_go_back",),
    ),
    Mutant(
        "buffer-released-before-durable",
        "a flush that fails lets go of what it did not write",
        "service/writing/flusher.py",
        "            self.error = error\n            raise\n",
        "            self.error = error\n            self._round = None\n            self._buffer.end_flush()\n      "
        "      raise\n",
        (f"{FULL}::test_a_full_disk_keeps_entries_searchable_and_pushes_back_at_the_buffers_bound",),
    ),
    Mutant(
        "positions-before-flush",
        "a position counts as durable before its entries are",
        "service/writing/flusher.py",
        "            self._round = self._begin()\n",
        "            self._round = self._begin()\n            self.positions = max_positions(self.positions, "
        "self._round.positions)\n",
        (f"{FULL}::test_a_flush_that_fails_makes_no_position_durable",),
    ),
    Mutant(
        "positions-with-the-first-piece",
        "a batch's position is durable with its first piece, not with its last",
        "service/writing/appenders.py",
        "self._append(file, piece, positions if last else {})\n            except OSError as error:",
        "self._append(file, piece, positions)\n            except OSError as error:",
        (CRASHES,),
    ),
    Mutant(
        "round-begun-again",
        "a flush that failed half-way writes its first half once more",
        "service/writing/appenders.py",
        "            progress(done)\n",
        "",
        (f"{FULL}::test_a_flush_that_failed_half_way_goes_on_where_it_stopped",),
    ),
    Mutant(
        "quarantine-late-side-open",
        "entries with a clock far in the past go to the main lane",
        "service/writing/flusher.py",
        "low, high = now_s - self.max_late_s,",
        "low, high = -(2.0**62),",
        (f"{BUFFER}::test_wild_clocks_go_to_quarantine_and_are_found",),
    ),
    Mutant(
        "quarantine-bound-exclusive",
        "an entry exactly at the bound of early clocks is quarantined",
        "service/writing/flusher.py",
        "(seconds > high)",
        "(seconds >= high)",
        (f"{BUFFER}::test_wild_clocks_go_to_quarantine_and_are_found",),
    ),
    Mutant(
        "difference-wraps",
        "a time difference that doesn't fit 32 bits wraps instead of rolling to the next file",
        "service/writing/appenders.py",
        "(differences > 2**31 - 1) | (differences < -(2**31))",
        "differences == 2**62",
        (f"{BUFFER}::test_seconds_too_far_apart_for_one_file_take_several",),
    ),
    Mutant(
        "given-up-files-positions-lost",
        "the positions of a file without entries are lost with it",
        "service/writing/appenders.py",
        "file.append(piece, names, max_positions(self._carried, positions))",
        "file.append(piece, names, positions)",
        (f"{BUFFER}::test_a_position_alone_outlives_the_file_it_was_put_to",),
    ),
    Mutant(
        "full-file-not-sealed",
        "a file that its last entry filled is not sealed",
        "service/writing/appenders.py",
        "if file.table.free == 0:",
        "if file.table.free < 0:",
        (f"{BUFFER}::test_the_logs_positions_never_run_ahead_of_entries_in_quarantine",),
    ),
    Mutant(
        "sealed-one-entry-early",
        "a file's last free entry is never used",
        "format/layout.py",
        "return self.items - 1",
        "return self.items - 2",
        ("tests/golden/test_codec_bytes.py::test_bytes_equal_java[exact_full-1]",),
    ),
    Mutant(
        "fenced-writer-accepts",
        "a fenced writer goes on accepting puts",
        "service/index.py",
        "        self._check_open()\n        if self._session.fenced is not None:\n",
        "        self._check_open()\n        if False:\n",
        ("tests/faults/test_writers.py::test_a_fenced_writer_publishes_nothing_and_keeps_its_files",),
    ),
)
