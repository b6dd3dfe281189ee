"""Defects of merges and of what they write: shards, window tables, orphans."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

HERE = "tests/unit/service/merge"
ANSWERS = f"{HERE}/test_answers.py"
GIANTS = f"{HERE}/test_giants_and_bounds.py"
BESIDE = f"{HERE}/test_readers_and_writers.py"
SHARD = "tests/unit/format/test_verify_shard.py"

MUTANTS = (
    Mutant(
        "merge-window-border",
        "the last second of a window goes to no table",
        "service/merge/task.py",
        "piece.seconds < window.begin_s + window.window_s",
        "piece.seconds < window.begin_s + window.window_s - 1",
        (f"{ANSWERS}::test_files_that_straddle_windows[native]",),
    ),
    Mutant(
        "merge-forgets-ids",
        "entries keep an id that means another topic in the table",
        "service/merge/task.py",
        "            if new != topic_id:\n",
        "            if new < 0:\n",
        (f"{ANSWERS}::test_topic_ids_that_clash",),
    ),
    Mutant(
        "merge-group-spreads-no-further",
        "a group's entries count where it begins, and a slot of few is taken for a giant",
        "service/merge/task.py",
        "return begins, np.maximum(begins + 1, -(-ends // self.step)), counts",
        "return begins, begins + 1, counts",
        (f"{GIANTS}::test_pieces_of_many_small_files_are_as_small",),
    ),
    Mutant(
        "merge-giant-in-one",
        "a hot key is held in memory whole",
        "service/merge/task.py",
        "if count <= 2 * most:",
        "if True:",
        (f"{GIANTS}::test_a_hot_key_goes_on_in_parts_and_a_page_reads_only_the_newest",),
    ),
    Mutant(
        "merge-publishes-what-is-gone",
        "two merges of the same files are both published",
        "service/merge/run.py",
        "        if gone:\n",
        "        if len(gone) == len(names) + 1:\n",
        (f"{BESIDE}::test_of_two_merges_of_the_same_files_one_is_overtaken",),
    ),
    Mutant(
        "merge-believes-its-sum",
        "a merge that wrote other entries than it read is published",
        "service/merge/run.py",
        '"wrote other entries than it read", read_sum % 2**64',
        '"wrote other entries than it read", written_sum % 2**64',
        (f"{BESIDE}::test_results_that_do_not_add_up_are_not_published",),
    ),
    Mutant(
        "merge-of-what-is-not-over",
        "a window is merged while it is still filled",
        "service/merge/plan.py",
        "(last + 1) * window_s > now_s - min_age_s",
        "last * window_s > now_s - min_age_s",
        (f"{ANSWERS}::test_a_window_is_merged_once_it_is_over_and_old_enough",),
    ),
    Mutant(
        "merge-tasks-read-everything",
        "every task of a merge reads the directory of every source",
        "service/merge/plan.py",
        "shard.slot_low < last and first < shard.slot_high",
        "True",
        (f"{HERE}/test_sources_of_tasks.py::test_a_directory_is_read_by_the_tasks_that_need_it",),
    ),
    Mutant(
        "merge-tasks-of-all-windows",
        "a task holds parts of an upload for each window of a job",
        "service/merge/plan.py",
        "if sum(sizes.values()) <= runs * _HELD_BYTES:",
        "if True:",
        (f"{HERE}/test_groups_of_windows.py::test_uploads_hold_as_much_for_many_windows_as_for_few[40]",),
    ),
    Mutant(
        "merge-group-reads-its-neighbours",
        "a file that lies in two groups of windows is read whole by both",
        "service/merge/task.py",
        " & (times >= seconds[0]) & (times <= seconds[1])",
        "",
        (f"{HERE}/test_groups_of_windows.py::test_uploads_hold_as_much_for_many_windows_as_for_few[40]",),
    ),
    Mutant(
        "merge-groups-read-all",
        "a task reads files that have no entries of its windows",
        "service/merge/plan.py",
        "ordered if stored.second_min < end_s and stored.second_max >= begin_s",
        "ordered",
        (f"{HERE}/test_groups_of_windows.py::test_uploads_hold_as_much_for_many_windows_as_for_few[40]",),
    ),
    Mutant(
        "merge-never-folds",
        "each late file adds a table to its window for good",
        "service/merge/plan.py",
        "len(tables) >= _MAX_TABLES)",
        "False)",
        (f"{ANSWERS}::test_small_tables_are_folded_before_there_are_too_many",),
    ),
    Mutant(
        "merge-error-of-taking-back",
        "the error of taking back hides the one that counts",
        "service/lifecycle/publication.py",
        "        with contextlib.suppress(StorageError):\n            if self.handle",
        "        with contextlib.suppress():\n            if self.handle",
        ("tests/faults/test_merge_faults.py::test_the_first_error_counts_not_that_of_taking_back",),
    ),
    Mutant(
        "table-reads-every-part",
        "a page of a hot key reads all its parts",
        "service/files/window_table.py",
        """(
                rows is not None
                and len(rows) > lookup.max_count
                and int(rows["second"][lookup.max_count]) > stored.second_max
            )""",
        "rows is not None and len(rows) > lookup.max_count and False",
        (f"{GIANTS}::test_a_hot_key_goes_on_in_parts_and_a_page_reads_only_the_newest",),
    ),
    Mutant(
        "table-shown-after-its-sources-go",
        "files that were merged stay among those that are read",
        "service/files/window_table.py",
        "handle.stored is not None and handle.file_id not in state.files",
        "handle.file_id is None",
        (f"{BESIDE}::test_a_running_reader_whose_files_are_gone_reads_the_log_again",),
    ),
    Mutant(
        "unheard-upload-twice",
        "a file whose record came through unheard is published again after a merge",
        "service/log/log.py",
        "        self._files.update(name",
        "        set().update(name",
        (f"{BESIDE}::test_an_upload_whose_record_came_through_unheard_is_not_published_again_after_a_merge",),
    ),
    Mutant(
        "table-waits-for-upload",
        "a window table counts as a file that waits, and the log's positions stand still",
        "service/lifecycle/context.py",
        "    return isinstance(handle, WindowTable)\n",
        "    return False\n",
        (f"{BESIDE}::test_positions_go_on_in_the_log_after_a_merge",),
    ),
    Mutant(
        "position-merged-away",
        "a local copy that is the last to say a source's position goes when its file is merged",
        "service/files/window_table.py",
        "            if keeps(handle):\n",
        "            if False:\n",
        (f"{BESIDE}::test_a_position_that_only_a_merged_local_copy_says_survives_a_crash",),
    ),
    Mutant(
        "orphans-of-a-moment-ago",
        "what a merge has just removed is deleted under its readers",
        "service/lifecycle/orphans.py",
        "{number: log.record(number).remove for",
        "{number: () for",
        (f"{BESIDE}::test_orphans_are_what_nobody_names_and_old_enough",),
    ),
    Mutant(
        "shard-order-unchecked",
        "verify passes over the border of two blocks",
        "format/verify.py",
        "before, self._before = self._before, items[-1:]",
        "before = self._before",
        (f"{SHARD}::test_order_across_blocks",),
    ),
    Mutant(
        "shard-sum-unchecked",
        "verify believes a shard's checksum",
        "format/verify.py",
        'meta.more.get("checksum", sum_found)),\n',
        "sum_found),\n",
        (f"{SHARD}::test_seconds_topics_filters_and_counts",),
    ),
    Mutant(
        "filter-of-its-estimate",
        "a shard of more entries than were expected can't be written",
        "format/bloom.py",
        "            if at + len(part) > len(self._hashes):\n",
        "            if at < 0:\n",
        ("tests/unit/format/test_bloom.py::test_a_filter_outgrows_what_was_expected",),
    ),
)
