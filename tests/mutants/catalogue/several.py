"""Defects of several indexes read as one: their order, what they share, and how a reader moves on with their logs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

HERE = "tests/unit/service/several"
ORDER = f"{HERE}/test_one_order.py"
TROUBLE = f"{HERE}/test_sources_in_trouble.py"
OPENING = f"{HERE}/test_opening.py"
SHARED = f"{HERE}/test_shared_bounds.py"
REFRESHES = f"{HERE}/test_refreshes.py"
LOGS = "tests/unit/service/cold/test_hanging_logs.py"
OVERDUE = "tests/unit/service/cold/test_overdue_logs.py"
LIMIT = "tests/unit/service/cold/test_thread_limit.py"
POOL = "tests/unit/service/test_daemon_pool.py"
CACHE = "tests/unit/service/cold/test_local_cache.py"
PARALLEL = "tests/unit/service/cold/test_parallel_reads.py"

MUTANTS = (
    Mutant(
        "ties-of-sources-lost-between-pages",
        "a page leaves out what a later source has at the cursor's very place",
        "service/reading/parts.py",
        "if self._number > last:",
        "if self._number < last:",
        (f"{ORDER}::test_pages_by_readers_of_other_orders_and_of_one_source_more[False-2]",),
    ),
    Mutant(
        "source-in-an-items-own-column",
        "the number of the source is written over a column of the index's own",
        "service/reading/parts.py",
        "while any(column.name == name for column in schema.extra):",
        "while not name:",
        (f"{ORDER}::test_further_columns_and_identities_beside_the_source[3-ZonedItem]",),
    ),
    Mutant(
        "files-without-their-source",
        "a file that failed doesn't say of which index it is",
        "service/reading/parts.py",
        "self.source: str | None = source",
        "self.source: str | None = None",
        (f"{ORDER}::test_entries_and_files_say_their_source",),
    ),
    Mutant(
        "one-index-read-twice",
        "an index that is named twice answers twice",
        "service/reader.py",
        "if len(self._names) < len(self._views):",
        "if not self._views:",
        (f"{OPENING}::test_one_index_given_twice",),
    ),
    Mutant(
        "schemas-read-together",
        "indexes of unlike entries are read as one",
        "service/reader.py",
        "if view.schema != first.schema:",
        "if not view.schema:",
        (f"{OPENING}::test_a_prefix_of_other_schemas",),
    ),
    Mutant(
        "broken-index-is-an-empty-folder",
        "an index below a prefix that lost its log is passed over as if it held nothing",
        "service/reader.py",
        "if next(iter(child.list(epoch_name(1))), None) is not None:",
        "if child is None:",
        (f"{TROUBLE}::test_an_index_without_its_log_is_no_empty_folder",),
    ),
    Mutant(
        "only-the-first-is-closed",
        "a close leaves the other indexes' storages open",
        "service/reader.py",
        "for view in self._views:\n                each.callback(view.close)",
        "for view in self._views[:1]:\n                each.callback(view.close)",
        (f"{OPENING}::test_a_close_closes_all",),
    ),
    Mutant(
        "caches-in-shares",
        "each index has but a part of the caches",
        "service/reader.py",
        "Caches(config.block_cache_bytes, config.directory_cache_bytes)",
        "Caches(config.block_cache_bytes, config.directory_cache_bytes // 3)",
        (f"{SHARED}::test_each_index_may_have_the_whole_of_the_caches[list]",),
    ),
    Mutant(
        "caches-mix-indexes-up",
        "objects of one name in two storages are one in the caches",
        "service/reading/views.py",
        "index_id=index_id,",
        'index_id="",',
        (f"{SHARED}::test_objects_of_one_name_are_kept_apart",),
    ),
    Mutant(
        "one-value-empties-a-cache",
        "a value as large as a cache throws everything else out",
        "service/cold/caches.py",
        "size_bytes * 2 <= self._max_bytes",
        "size_bytes <= self._max_bytes",
        (f"{PARALLEL}::test_the_memory_keeps_its_bound_and_what_was_used_last[7]",),
    ),
    Mutant(
        "damaged-entry-told-again-and-again",
        "each probe of a damaged cache entry that stays is a warning",
        "service/cold/disk_cache.py",
        "if gone or not known:",
        "if path:",
        (f"{CACHE}::test_a_damaged_entry_that_stays_is_told_of_once_and_is_as_good_as_absent",),
    ),
    Mutant(
        "replaced-entry-passed-over",
        "an entry that took a damaged one's place is not read",
        "service/cold/disk_cache.py",
        "self._passed_over.get(path) == _identity(status)",
        "path in self._passed_over",
        (f"{CACHE}::test_a_damaged_entry_that_stays_is_told_of_once_and_is_as_good_as_absent",),
    ),
    Mutant(
        "only-the-first-error-of-a-refresh",
        "a refresh succeeds although a later index's log could not be read",
        "service/reader.py",
        "states = [reading.result() for reading in readings]",
        "states = [readings[0].result()]",
        (f"{REFRESHES}::test_a_refresh_that_is_asked_for_does_all_and_tells_the_first_error",),
    ),
    Mutant(
        "refreshes-of-nobody",
        "reading logs in other threads is counted to no lookup",
        "service/threads/__init__.py",
        "partial(contextvars.copy_context().run, call, *arguments)",
        "partial(call, *arguments)",
        (f"{REFRESHES}::test_refreshes_are_counted_to_their_lookup",),
    ),
    Mutant(
        "damaged-log-fails-partial-answers",
        "a damaged log record ends lookups that would take a partial answer",
        "service/reading/views.py",
        "except (StorageError, CorruptFile) as error:",
        "except StorageError as error:",
        (f"{LOGS}::test_a_damaged_log_record_leaves_no_answer_complete[None-False]",),
    ),
    Mutant(
        "lost-object-beside-a-damaged-log",
        "an object is gone, the log damaged: no partial answer is to be had",
        "service/lookup/scan.py",
        "meant = unread  # nobody knows what became of it",
        "raise",
        (f"{LOGS}::test_an_object_that_is_gone_and_a_damaged_log",),
    ),
    Mutant(
        "anothers-budget-ends-the-wait",
        "who waits for another lookup's reading of the log fails by that one's budget",
        "service/reading/views.py",
        "                if mine:\n                    raise\n",
        "                raise\n",
        (f"{LOGS}::test_who_waits_for_anothers_reading_has_a_budget_of_its_own",),
    ),
    Mutant(
        "closed-reader-fills-its-catalog",
        "a log read behind a close brings back the files that closing has let go of",
        "service/reading/views.py",
        "if self._closed:",
        "if not self._parts:",
        (f"{LOGS}::test_a_close_does_not_wait_for_a_request_that_hangs[get]",),
    ),
    Mutant(
        "bound-of-ranges-for-each-index",
        "each index of a reader has a bound of ranges of its own",
        "service/reading/views.py",
        "range_reads=parts.range_reads,",
        "range_reads=None,",
        (f"{SHARED}::test_one_bound_of_ranges_that_travel_over_all",),
    ),
    Mutant(
        "claim-kept-without-a-thread",
        "a refresh whose thread can't be started stays claimed: nobody reads the log any more",
        "service/reader.py",
        "view.release_claim()",
        "pass",
        (f"{LIMIT}::test_a_due_refresh_without_a_thread_is_done_by_the_next_lookup[300.0]",),
    ),
    Mutant(
        "thread-listed-that-never-started",
        "a close waits for a thread that could not be started",
        "service/threads/__init__.py",
        "        thread.start()\n        work.threads.append(thread)",
        "        work.threads.append(thread)\n        thread.start()",
        (f"{POOL}::test_the_first_thread_cant_be_started",),
    ),
    Mutant(
        "refused-call-counted",
        "a call that no thread could be had for counts as under way for ever",
        "service/threads/__init__.py",
        "                        work.count(-1)\n",
        "                        work.count(0)\n",
        (f"{POOL}::test_no_thread_is_left_behind_a_refused_call",),
    ),
    Mutant(
        "pools-wait-one-after-another",
        "a close waits a second for each pool",
        "service/threads/__init__.py",
        "close_until_s() if until_s is None else until_s",
        "close_until_s()",
        (f"{POOL}::test_pools_closed_together_wait_once[True]",),
    ),
    Mutant(
        "complete-however-old",
        "an answer is complete though the log has been hanging for hours",
        "service/reading/views.py",
        "return interval_s + max(interval_s, _OVERDUE_S)",
        "return 1e9",
        (f"{OVERDUE}::test_one_that_may_make_no_request_is_not_complete_either",),
    ),
    Mutant(
        "patient-lookup-waits-for-nobody",
        "a lookup without a bound of time is answered from before a refresh that is under way",
        "service/reader.py",
        "view.catch_up(before, begun_s)",
        "pass",
        (f"{OVERDUE}::test_who_joins_a_refresh_that_came_to_nothing_does_it",),
    ),
    Mutant(
        "joined-a-reading-of-long-ago",
        "a lookup that joins a refresh which began long before fails instead of reading again",
        "service/reading/views.py",
        " or self._is_too_old(begun_s)",
        "",
        (f"{OVERDUE}::test_who_joins_a_refresh_that_began_long_before_reads_again",),
    ),
    Mutant(
        "refresh-removes-what-was-published-meanwhile",
        "a refresh that has read the log before a file was published takes it out of the catalog",
        "service/lifecycle/context.py",
        "handles, known = self.catalog.all(), self.session.log.state  # in this order, as above",
        "known = self.session.log.state; handles = self.catalog.all()",
        ("tests/regressions/test_refreshes_side_by_side.py::test_a_file_published_during_a_refresh_stays",),
    ),
    Mutant(
        "place-of-another-index",
        "what lay at a rewritten place is looked up among the entries of whichever index",
        "service/lookup/query.py",
        "more = [number for number, source in self.sources.items() if source == item.source]",
        "more = [0]",
        (f"{ORDER}::test_what_was_written_anew_is_looked_up_in_its_own_index[a]",),
    ),
    Mutant(
        "messages-of-another-broker",
        "the messages of every index are read from the archive of one",
        "rocketmq/archive/messages.py",
        "return self._archives[source]",
        "return next(iter(self._archives.values()))",
        ("tests/integration/cli/test_query_messages.py::test_messages_of_several_brokers_are_one_answer[list]",),
    ),
    Mutant(
        "entries-on-two-pages",
        "an entry that was put with two times stands on two pages of a whole answer",
        "service/lookup/lookups.py",
        "items=tuple(unseen(page.items, seen))",
        "items=page.items",
        ("tests/unit/service/test_paging_and_cursors.py::test_all_pages_are_the_whole_answer[1]",),
    ),
    Mutant(
        "cancelled-and-read-on",
        "a lookup whose task was cancelled goes on to the end",
        "service/async_reader.py",
        "usage.max_requests = 0",
        "pass",
        ("tests/unit/service/test_async_reader.py::test_a_cancelled_task_sends_no_further_request",),
    ),
)
