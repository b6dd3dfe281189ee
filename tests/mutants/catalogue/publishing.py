"""Defects of what builds and merges publish, of what they send before that, and of the sweep behind them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MERGES = "tests/unit/service/merge"
BESIDE = f"{MERGES}/test_readers_and_writers.py"
SWEEPS = f"{MERGES}/test_sweeps_and_pages.py"
PUBLISHING = "tests/spark/test_publishing.py"
RANGES = "tests/spark/test_source_ranges.py"
PARTS = "tests/spark/test_parts.py"
KILLED = "tests/spark/test_beside_killed_drivers.py"
SHARD = "tests/unit/format/test_shard.py"

MUTANTS = (
    Mutant(
        "build-published-twice",
        "a build whose record came through unheard is published again",
        "spark/build/build.py",
        "        if added <= state.objects.keys():\n",
        "        if not added:\n",
        (f"{PUBLISHING}::test_an_append_whose_answer_was_lost_is_found_and_not_repeated",),
    ),
    Mutant(
        "build-mode-before-the-log",
        "two builds of one window at once are both published, whatever their mode",
        "spark/build/build.py",
        "removed = _replaced(state, windows, mode) + repeated(",
        "removed = repeated(",
        (f"{PUBLISHING}::test_two_builds_of_one_window_at_once",),
    ),
    Mutant(
        "build-replaces-one-shard",
        "of a table that is replaced all shards but one stay",
        "spark/build/build.py",
        "replaced += [stored.name for stored in shards]",
        "replaced += [shards[0].name]",
        (f"{PUBLISHING}::test_two_builds_of_one_window_at_once",),
    ),
    Mutant(
        "build-replaces-beside",
        "a build replaces the table of the day behind its own",
        "spark/build/build.py",
        "if w[0] < end and begin < w[1]",
        "if w[0] < end and begin <= w[1]",
        (f"{KILLED}::test_a_driver_killed_at_each_call_of_publish",),
    ),
    Mutant(
        "range-not-said",
        "a build that continued a source does not say how far, and the next one doubles it",
        "spark/build/build.py",
        "            positions[source_range.name] = source_range.end\n",
        "            pass\n",
        (f"{RANGES}::test_a_driver_killed_at_its_record_says_both_or_nothing",),
    ),
    Mutant(
        "range-before-the-log",
        "two builds at once continue a source from one position, and double it",
        "spark/build/build.py",
        "        if source_range is not None:\n            source_range.check(state)\n",
        "",
        (f"{RANGES}::test_of_two_builds_that_continue_at_once_one_is_published",),
    ),
    Mutant(
        "range-with-a-gap",
        "a build passes over what no build had of a source",
        "spark/build/positions.py",
        "        if reached != self.begin:\n",
        "        if reached > self.begin:\n",
        (f"{RANGES}::test_builds_continue_a_source_where_the_index_stands",),
    ),
    Mutant(
        "merge-published-twice",
        "a merge whose record came through unheard fails as if others had been faster",
        "service/merge/run.py",
        "        if added <= state.objects.keys() and (added or len(gone) == len(names)):\n",
        "        if not added:\n",
        (f"{BESIDE}::test_publishing_again_after_an_unknown_outcome_finds_its_own_record",),
    ),
    Mutant(
        "merge-of-some-results",
        "a merge is published without what one of its tasks wrote",
        "service/merge/run.py",
        "    if numbers != [task.number for task in job.tasks]:\n",
        "    if len(numbers) > len(job.tasks):\n",
        (f"{BESIDE}::test_results_that_do_not_add_up_are_not_published",),
    ),
    Mutant(
        "merge-of-part-of-a-source",
        "a source that was read in part is removed whole",
        "service/merge/run.py",
        "problem, stored.count, read)",
        "problem, stored.count, max(stored.count, read))",
        (f"{BESIDE}::test_results_that_do_not_add_up_are_not_published",),
    ),
    Mutant(
        "merge-keeps-its-sources",
        "the record adds the tables and leaves the files",
        "service/merge/run.py",
        "stored, names, left_out=",
        "stored, names[1:], left_out=",
        (f"{MERGES}/test_answers.py::test_files_that_straddle_windows[native]",),
    ),
    Mutant(
        "merge-overtaken-leaves-all",
        "what an overtaken merge has uploaded stays",
        "service/lifecycle/publication.py",
        "is_over = self._epoch is None and",
        "is_over = False and",
        (f"{BESIDE}::test_a_merge_that_is_overtaken_plans_anew_and_leaves_nothing",),
    ),
    Mutant(
        "object-of-another-size",
        "an object that lost its end on the way is published",
        "service/lifecycle/publication.py",
        "if size == one.size_bytes:",
        "if size == one.size_bytes or self._epoch is None:",
        (f"{BESIDE}::test_results_that_do_not_add_up_are_not_published",),
    ),
    Mutant(
        "upload-parts-of-one-number",
        "each part of an upload takes the place of the one before",
        "service/lifecycle/publication.py",
        "upload_part(self.handle, len(self.parts) + 1, data)",
        "upload_part(self.handle, 1, data)",
        (f"{PUBLISHING}::test_two_builds_of_one_window_at_once",),
    ),
    Mutant(
        "upload-left-by-a-task",
        "a task that fails leaves its unfinished uploads",
        "spark/build/shards.py",
        "        failing.callback(writer.abandon)\n",
        "",
        (f"{PUBLISHING}::test_a_task_whose_storage_fails_takes_back_what_it_uploaded[upload_part]",),
    ),
    Mutant(
        "table-of-another-window",
        "entries go on in the shard that is open, whatever window they are of",
        "spark/build/shards.py",
        "        if self._shard != (index, shard):\n",
        "        if self._shard is None:\n",
        (f"{PARTS}::test_shards_answer_as_the_model_whatever_the_size_of_pieces[4-10000]",),
    ),
    Mutant(
        "block-numbers-of-too-few-bytes",
        "on its way to the tasks that write a number loses the byte that it needs beyond 2, 4 or 6",
        "spark/build/shards.py",
        "for size in (8, 4, 2, 1) if width & size]",
        "for size in (8, 4, 2) if width & size]",
        (f"{PARTS}::test_items_become_what_they_were_of_as_few_bytes_as_their_numbers_need",),
    ),
    Mutant(
        "piece-begins-on-disk",
        "the oldest part of a hot key's piece, which is cut by time, is lost",
        "spark/build/shards.py",
        "            yield from enumerate(self._cut())\n",
        "            yield from list(enumerate(self._cut()))[:-1]\n",
        (f"{PARTS}::test_shards_answer_as_the_model_whatever_the_size_of_pieces[1-60]",),
    ),
    Mutant(
        "table-time-of-its-source",
        "times in a table stay relative to the file that they came from",
        "service/merge/task.py",
        '        items["time_diff_s"] = seconds - window.begin_s\n',
        "",
        (f"{MERGES}/test_answers.py::test_files_that_straddle_windows[native]",),
    ),
    Mutant(
        "table-topics-of-another",
        "a shard names topics that it has no entries of, and none of its own",
        "service/merge/task.py",
        "if topic_id in shard.used_topics}",
        "if topic_id not in shard.used_topics}",
        (f"{MERGES}/test_answers.py::test_topic_ids_that_clash",),
    ),
    Mutant(
        "orphans-of-any-age",
        "what is being uploaded is deleted before it can be published",
        "service/lifecycle/orphans.py",
        "if info.modified_ms < before_ms or info.name in over]",
        "if info.modified_ms <= clock.now_ms()]",
        (f"{BESIDE}::test_orphans_are_what_nobody_names_and_old_enough",),
    ),
    Mutant(
        "uploads-of-any-age",
        "an upload that is under way is aborted",
        "service/lifecycle/orphans.py",
        "older_than_ms=before_ms)",
        "older_than_ms=None)",
        (f"{SWEEPS}::test_uploads_under_way_are_left_alone_until_they_are_old",),
    ),
    Mutant(
        "orphans-of-an-old-log",
        "what was published while a sweep looked is deleted",
        "service/lifecycle/orphans.py",
        "    state = log.refresh()\n    removed = ",
        "    state = log.state\n    removed = ",
        (f"{SWEEPS}::test_what_is_published_while_a_sweep_looks_is_no_orphan",),
    ),
    Mutant(
        "sum-without-times",
        "entries of other times have the checksum of the right ones",
        "format/shard.py",
        'if name != "time_diff_s"), seconds)',
        'if name != "time_diff_s"), np.zeros(len(seconds), np.int64))',
        (f"{SHARD}::test_checksums_tell_multisets_apart",),
    ),
    Mutant(
        "shard-interval-of-its-last-piece",
        "a shard's interval is that of its last piece, and lookups of other times pass it over",
        "format/shard.py",
        "self.second_max = max(self.second_max, int(seconds.max()))",
        "self.second_max = int(seconds.max())",
        (f"{SHARD}::test_pieces_make_no_difference",),
    ),
    Mutant(
        "shard-filter-forgets",
        "a shard's filter knows only the keys of its last piece, and says no to the others",
        "format/shard.py",
        "        self._filter.add(filter_hashes(",
        "        self._filter = FilterBuilder(1)\n        self._filter.add(filter_hashes(",
        (f"{SHARD}::test_every_key_is_found_by_the_directory",),
    ),
)
