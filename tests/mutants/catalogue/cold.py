"""Defects of the cold path: what it fetches, believes, keeps and may spend."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

HERE = "tests/unit/service/cold"
BELIEVED = f"{HERE}/test_never_believed.py"
BUDGETS = f"{HERE}/test_budgets.py"
FILTERS = f"{HERE}/test_filters.py"
CACHE = f"{HERE}/test_local_cache.py"
PARALLEL = f"{HERE}/test_parallel_reads.py"
WIDTH = f"{HERE}/test_reads_at_once.py"

MUTANTS = (
    Mutant(
        "spoiled-range-not-asked-again", "one bad transfer makes a sound object a corrupt one",
        "service/cold/path.py", '            _log.warning("fetched again: %s", error)\n', "            raise\n",
        (f"{BELIEVED}::test_a_range_answered_wrongly_is_asked_once_more[native-wrong]",),
    ),
    Mutant(
        "range-of-any-length", "a range that came back longer is taken for the one asked for",
        "service/cold/path.py", "if len(data) != length:", "if len(data) < length:",
        (f"{BELIEVED}::test_a_range_always_answered_wrongly_is_corrupt[native-long]",),
    ),
    Mutant(
        "one-lookups-budget-fails-others", "a lookup that waited for a directory fails by the budget of the one that fetched it",
        "service/cold/path.py", "except (BudgetExceeded, _Abandoned):", "except _Abandoned:",
        (f"{BUDGETS}::test_an_interrupted_lookup_does_not_end_those_that_waited_for_its_directory[BudgetExceeded]",),
    ),
    Mutant(
        "interrupt-ends-other-lookups", "who waits for a directory is interrupted with the one that fetches it",
        "service/cold/path.py", "error if isinstance(error, TieredIndexError) else _Abandoned()", "error",
        (f"{BUDGETS}::test_an_interrupted_lookup_does_not_end_those_that_waited_for_its_directory[KeyboardInterrupt]",),
    ),
    Mutant(
        "directory-fetched-by-each", "lookups at the same time fetch the same directory each for itself",
        "service/cold/path.py", "fetch = self._fetches.setdefault(stored.name, mine)", "fetch = mine",
        (f"{PARALLEL}::test_lookups_of_one_file_wait_for_one_directory",),
    ),
    Mutant(
        "ranges-without-bound", "more ranges travel at once than may",
        "service/cold/range_pool.py", "threading.BoundedSemaphore(ranges)", "threading.BoundedSemaphore(1 << 20)",
        (f"{PARALLEL}::test_lookups_of_one_file_each_share_the_bound",),
    ),
    Mutant(
        "filter-fails-the-lookup", "a filter that can't be had makes a lookup fail that needs none",
        "service/cold/path.py", "except (BudgetExceeded, CorruptFile, StorageError) as error:", "except BudgetExceeded as error:",
        (f"{FILTERS}::test_a_damaged_filter_is_passed_over[native]",),
    ),
    Mutant(
        "filter-fetched-though-at-hand", "keys that a filter takes for present make it be fetched again",
        "service/cold/filters.py", "if self._block(stored, block_number(hash64, blocks)) is not None:", "if blocks < 0:",
        (f"{FILTERS}::test_a_mistaken_filter_is_not_fetched_again_and_again[native]",),
    ),
    Mutant(
        "filter-of-the-wrong-block", "a batch looks for a key's bits in another block of the filter",
        "service/cold/filters.py", "place * _BLOCKS_A_PIECE + numbers % _BLOCKS_A_PIECE", "place * _BLOCKS_A_PIECE",
        (f"{FILTERS}::test_a_batch_asks_the_filters_too[native]",),
    ),
    Mutant(
        "cache-entry-unchecked", "an entry of the local cache is believed without its CRC32",
        "service/cold/disk_cache.py", "return piece if zlib.crc32(", "return piece if piece or zlib.crc32(",
        (f"{CACHE}::test_no_flipped_byte_of_an_entry_is_believed[trailer]",),
    ),
    Mutant(
        "cache-entry-of-another-object", "an entry copied to another object's name is believed",
        "service/cold/disk_cache.py", r'zlib.crc32(f"{self._index_id}\n{name}\n{kind}\n{number}".encode())', "0",
        (f"{CACHE}::test_what_is_not_this_entry_is_fetched_again[_other_object-filter]",),
    ),
    Mutant(
        "cache-without-bound", "the local cache grows past its bound",
        "service/cold/disk_cache.py", "if self._size_bytes <= self.max_bytes * _SLACK:", "if self._size_bytes:",
        (f"{CACHE}::test_the_bound_is_kept_and_the_oldest_used_go",),
    ),
    Mutant(
        "cache-newest-goes-first", "a full cache throws out what was used last",
        "service/cold/disk_cache.py", "entries = sorted(self._entries())", "entries = sorted(self._entries(), reverse=True)",
        (f"{CACHE}::test_the_bound_is_kept_and_the_oldest_used_go",),
    ),
    Mutant(
        "reader-writes-beside-the-writer", "a reader writes into the cache of the writer beside it",
        "service/cold/disk_cache.py", "return not self.read_only and size_bytes", "return size_bytes",
        (f"{CACHE}::test_a_reader_beside_its_writer_changes_nothing_in_the_writers_cache",),
    ),
    Mutant(
        "gap-of-any-width", "groups far apart are joined, and all that lies between is read",
        "service/cold/range_pool.py", "<= gap_bytes and end", ">= 0 and end",
        (f"{PARALLEL}::test_spans_cover_each_run_once",),
    ),
    Mutant(
        "memory-forgets-the-newest", "the cache in memory throws out what it has just taken",
        "service/cold/memory_cache.py", "popitem(last=False)", "popitem(last=True)",
        (f"{PARALLEL}::test_the_memory_keeps_its_bound_and_what_was_used_last",),
    ),
    Mutant(
        "all-files-at-once", "files are searched as fast as threads allow, however few answers are missing",
        "service/lookup/scan.py", "min(self._threads, max(width, missing)) if missing else self._threads", "self._threads",
        (f"{BUDGETS}::test_early_pages_stay_within_what_they_need",),
    ),
    Mutant(
        "needed-files-one-by-one", "files that nothing spares are searched one after another once the answer is full",
        "service/lookup/scan.py", "max(width, missing)) if missing else self._threads", "max(width, missing))",
        (f"{WIDTH}::test_files_that_the_answers_at_hand_do_not_spare_are_read_side_by_side",),
    ),
    Mutant(
        "newest-second-unknown", "files that reach to the end of the range wait for one another",
        "service/lookup/scan.py", "0 if handle.second_max >= newest else scan.missing()", "scan.missing()",
        (f"{WIDTH}::test_files_that_reach_to_the_end_of_the_range_are_read_at_once",),
    ),
    Mutant(
        "batch-as-wide-as-its-keys", "a batch reads as many files at once as it has keys",
        "service/lookup/query.py", "lambda second_max: False, lambda: 0, 0,", "lambda second_max: False, lambda: len(batch), 1 << 62,",
        (f"{WIDTH}::test_a_batch_of_any_size_reads_as_many_files_at_once_as_may_be[1]",),
    ),
    Mutant(
        "shards-one-after-another", "a batch reads the shards of a table one after another",
        "service/files/window_table.py", "for part in side_by_side(searches)", "for part in [search() for search in searches]",
        ("tests/unit/service/merge/test_shards_at_once.py::test_shards_of_a_table_are_read_side_by_side[3]",),
    ),
    Mutant(
        "lost-objects-one-by-one", "each object that is gone makes a lookup look at the log and begin again",
        "service/lookup/query.py", "return len(lost) < len(missing)", "return True",
        ("tests/unit/service/cold/test_lost_objects.py::test_any_number_of_lost_objects_costs_one_pass_and_one_look_at_the_log",),
    ),
    Mutant(
        "given-up-passes-are-the-logs", "what was read of files before the log had moved on counts as read of the log",
        "service/lookup/query.py", "self._told, scan.outdated = True, self._outdated", "self._told = True",
        ("tests/unit/service/cold/test_lost_objects.py::test_a_file_that_a_record_removed_makes_one_more_pass_whose_rows_say_so",),
    ),
    Mutant(
        "damaged-copy-outlasts-the-timeout", "the storage behind a damaged local copy is asked in the caller's thread",
        "service/lookup/scan.py", "with measured(self._storages, Usage(max_requests=0)):", "with measured(self._storages, Usage()):",
        (f"{WIDTH}::test_a_storage_that_hangs_behind_a_damaged_copy_is_given_up",),
    ),
    Mutant(
        "given-up-search-goes-on", "a search that nobody waits for any more goes on asking the storage",
        "service/lookup/scan.py", "if usage is not None:\n                usage.max_requests = 0",
        "if usage is None:\n                usage = self._usage",
        (f"{PARALLEL}::test_a_search_that_is_given_up_asks_for_nothing_more",),
    ),
    Mutant(
        "request-limit-ignored", "max_requests bounds nothing",
        "service/lookup/budget.py", "max_requests=limits.max_requests,", "max_requests=None,",
        (f"{BUDGETS}::test_max_requests_is_never_passed[3]",),
    ),
    Mutant(
        "local-answers-cost-time-only", "a lookup without a request left doesn't look at what is local",
        "service/lookup/scan.py", "any(not isinstance(error, BudgetExceeded) for _, error in self.errors)", "bool(self.errors)",
        (f"{BUDGETS}::test_local_files_are_answered_for_nothing",),
    ),
    Mutant(
        "endless-timeout-overflows", "a timeout of centuries is no timeout but a crash",
        "service/lookup/budget.py", "self.timeout_s < _LONGEST_S", "self.timeout_s > 0",
        (f"{BUDGETS}::test_a_timeout_of_any_length_is_a_timeout[317 years]",),
    ),
    Mutant(
        "opening-without-a-deadline", "opening a reader waits for the storage for as long as it takes",
        "service/reader.py", "with deadline_at(limits.deadline_s()):", "with deadline_at(None):",
        ("tests/unit/service/cold/test_opening_in_time.py::test_the_time_is_of_the_opening_alone",),
    ),
)  # fmt: skip
