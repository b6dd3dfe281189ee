"""Defects of answers: entries left out or answered twice, or an incomplete answer that is called complete."""

from tests.mutants.mutant import parsed

MUTANTS = parsed(r"""
range-end-exclusive: a lookup leaves out an entry of the range's last second
  in LookupBatch.select
  - (seconds <= self.second_max[lookups])
  + (seconds < self.second_max[lookups])
  tests/unit/service/test_parts_of_lookups.py::test_both_ends_of_the_range_are_in_it
range-begin-exclusive: a lookup leaves out an entry of the range's first second
  in LookupBatch.select
  - (seconds >= self.second_min[lookups])
  + (seconds > self.second_min[lookups])
  tests/unit/service/test_parts_of_lookups.py::test_both_ends_of_the_range_are_in_it
reader-file-end-exclusive: a reader skips a file whose last second is the range's first one
  in _within
  - handle.second_max >= second_min
  + handle.second_max > second_min
  tests/unit/service/test_buffer_flush_catalog.py::test_a_files_interval_grows_with_what_it_takes
view-of-a-root-of-an-earlier-look: a lookup searches the files that a root had before its writer's last flush
  in RootView.unchanged
  - return look if self._states(paths) == states else None
  + return look
  tests/unit/service/test_readers_of_growing_files.py::test_a_look_counts_until_something_changes
ends-beside-a-slow-file: a lookup leaves out a slow file because an older one under way can be skipped
  in FileReader.read
  - while searching and not all(scan.can_skip(
  + while searching and not any(scan.can_skip(
  tests/golden/test_faults_of_rocketmq.py::test_an_answer_waits_for_a_slow_file_though_an_older_one_can_be_skipped
behind-its-partitions: an answer is complete as of a time that a partition of its topic was not read up to
  in types.py:freshness_of
  - as_of_ms = min([*published_ms, *times]) if
  + as_of_ms = max([*published_ms, *times]) if
  tests/unit/service/test_freshness.py::test_a_topic_is_complete_only_up_to_where_its_source_was_read
read-by-some-partitions: a topic counts as read whole although one partition is behind
  in TopicRead.reach
  - any(positions[name] < end for name, end
  + all(positions[name] < end for name, end
  tests/kafka/test_read_whole.py::test_a_topic_is_read_up_to_a_look_once_every_partition_has_reached_its_end_of_then
time-of-all-topics-unused: an answer about a topic that no entry has claims to have what its source got later
  in TopicBounds.read_before
  - known.get(topic, of_others)
  + known.get(topic)
  tests/unit/service/test_freshness.py::test_the_time_of_a_source_is_for_all_topics_without_one_of_their_own[False]
time-of-the-end-of-a-round: an answer claims to have messages that came while a store's log was read
  in Dispatcher._batches
  - read_ms = begun_ms if
  + read_ms = self._clock.now_ms() if
  tests/rocketmq/test_read_whole.py::test_the_time_is_that_of_the_begin_of_a_round_also_if_messages_come_in_each_round
damage-taken-for-the-end: an answer claims to have messages behind a damaged one
  in Dispatcher._batches
  - is_end = self._tail is None or not
  + is_end = True or not
  tests/rocketmq/test_read_whole.py::test_a_damaged_message_that_others_follow_stops_the_time
hole-taken-for-the-end: an answer claims to have messages behind zeros that were skipped
  in Dispatcher._taken
  - and batch.messages and not batch.skipped:
  + and batch.messages:
  tests/rocketmq/test_read_whole.py::test_zeros_that_are_skipped_were_not_the_end
unread-files-taken-for-read: an answer claims to have rows of files that wait for a later look
  in FileLinker.run
  - self.is_whole = not (has_moved or self._damaged.are_read_later or self._waits)
  + self.is_whole = True
  tests/unit/cli/test_files_read_whole.py::test_a_file_that_a_later_look_reads_stops_the_time[written]
as-of-the-future: a producer with a fast clock makes answers complete up to its time
  in LogState.as_of_ms
  - return min(newest_ms, self.put_before_ms // 1000 * 1000)
  + return max(newest_ms, self.put_before_ms // 1000 * 1000)
  tests/unit/service/test_freshness.py::test_a_fast_clock_makes_no_answer_complete_up_to_the_future
order-by-second: answers are in rising order of time
  in with_repeats
  - ~rows["offset"], -rows["second"], *owners]
  + ~rows["offset"], rows["second"], *owners]
  tests/unit/service/test_paging_and_cursors.py::test_the_first_answers_are_a_sort_and_a_set
order-by-offset: within a second, answers are in rising order of offset
  in with_repeats
  - ~rows["offset"], -rows["second"], *owners]
  + rows["offset"], -rows["second"], *owners]
  tests/unit/service/test_paging_and_cursors.py::test_the_first_answers_are_a_sort_and_a_set
identity-without-queue: messages of one offset in two queues become one answer
  in with_repeats
  - for name in ("queue_id", "offset", *
  + for name in ("offset", *
  tests/unit/service/test_paging_and_cursors.py::test_the_first_answers_are_a_sort_and_a_set
identity-kept-twice: an entry that was put twice becomes two answers
  in OrderedRows.first
  - is_wanted[self._repeats] = False
  + is_wanted[self._repeats] = True
  tests/unit/service/test_paging_and_cursors.py::test_the_first_answers_are_a_sort_and_a_set
identity-without-topic: answers include entries of another topic whose key has the same hash
  in LookupBatch.select
  - keep &= topics == allowed[0] if
  + keep &= topics >= 0 if
  tests/unit/service/test_parts_of_lookups.py::test_both_ends_of_the_range_are_in_it
one-answer-too-many: an answer has one entry more than max_count (RocketMQ 10471)
  in batch.py:best_answers
  - page = rows[: limits[0]]
  + page = rows[: limits[0] + 1]
  tests/unit/service/cold/test_hot_keys.py::test_a_page_reads_the_blocks_it_needs
file-skipped-one-second-early: a file is skipped although it ends in the second of the last answer
  in MatchAccumulator.can_skip
  - second_max >= self._cutoff
  + second_max > self._cutoff
  tests/unit/service/several/test_one_order.py::test_messages_have_the_order_of_their_entries
skipped-file-called-complete: an answer that left out files is called complete
  in MatchAccumulator.answers
  - has_more=self.skipped)
  + has_more=False)
  tests/unit/service/test_paging_and_cursors.py::test_an_answer_that_left_files_out_is_not_called_complete
failed-file-called-complete: an answer is called complete although a file could not be read
  in QueryResults._result
  - "partial" if failed else "truncated" if more
  + "truncated" if more
  tests/faults/test_damage.py::test_a_damaged_unsealed_file_fails_the_lookups_that_meet_it_and_is_kept
  tests/property/test_query_many.py::test_a_lost_object_fails_the_batch_or_is_named
failure-is-a-short-list: an unreadable file makes the answer short, without an error
  in _unfailed
  - if index_pass.scan.errors and index_pass.run.fails(index_pass.scan):
  + if index_pass.scan.errors and index_pass.run.fails(index_pass.scan) and not index_pass.scan.notes:
  tests/faults/test_damage.py::test_a_damaged_unsealed_file_fails_the_lookups_that_meet_it_and_is_kept
lost-object-is-a-short-list: an object that the log names but the storage lacks is skipped
  in LookupRun._were_removed
  - if lost and not self.allow_partial:
  + if lost and not self._read_log:
  tests/golden/test_faults_of_rocketmq.py::test_an_unreadable_object_is_no_short_answer
removed-object-not-looked-up-again: a lookup fails because a later record removed an object
  in LookupRun._were_removed
  - if error.name in state.objects]
  + if state.objects or state.number]
  tests/faults/test_damage.py::test_an_object_that_a_later_record_removed_makes_a_reader_look_again[False]
cursor-repeats-its-last: a page begins with the last answer of the page before
  in are_after
  - else values > bound)
  + else values >= bound)
  tests/golden/test_faults_of_rocketmq.py::test_a_long_chain_is_found_whole_at_once_and_page_by_page
cursor-skips-ties: a page leaves out answers of the last second of the page before
  in are_after
  - later |= equal & (values < bound
  + later |= equal & (name == "second") & (values < bound
  tests/property/test_service_machine.py::test_an_index_answers_as_the_model_does[memory]
strangers-answer: answers include entries of a file of another schema
  in _Recovery.run
  - self._set_strangers_aside(layout)
  tests/faults/test_roots.py::test_a_file_of_another_schema_is_named_kept_and_never_published
true-interval-lost: a compacted file's interval begins at its begin time, so that it hides late messages (RocketMQ 10268)
  in Compaction.__init__
  - min(topic.second_min for topic in self._topic_stats)
  + begin_ms // 1000
  tests/unit/service/test_buffer_flush_catalog.py::test_a_files_interval_grows_with_what_it_takes
group-before: the first slot of a group is looked up in the group before
  in Directory.runs_of
  - self._first_slots, slots, "right")
  + self._first_slots, slots, "left")
  tests/unit/format/test_compacted.py::test_runs_skip_right_blocks
block-bound-exclusive: a block is not read if its newest second is the range's first one
  in Directory._runs_within
  - (blocks["second_max"] >= second_min)
  + (blocks["second_max"] > second_min)
  tests/unit/format/test_compacted.py::test_runs_skip_right_blocks
chain-cut-at-limit: a chain longer than the limit is cut there, as RocketMQ's are at 512
  in format/unsealed.py:walk_chains
  - if np.any(index > 0):
  + if False:
  tests/unit/format/test_unsealed.py::test_a_walk_gives_up_on_its_limit_and_on_chains_that_do_not_fall[NumPy]
chain-cut-between-batches: a chain ends at the begin of a batch
  in UnsealedTable._insert_sorted
  - previous[firsts] = heads[slots[firsts]]
  + previous[firsts] = 0 * heads[slots[firsts]]
  tests/unit/format/test_unsealed.py::test_batches_split_anywhere_equal_single_inserts
hash-min-value-lookup: a lookup leaves Integer.MIN_VALUE as 2**31
  in lookup_numbers
  - return mask if java == mask else -java & 0x7FFFFFFF, mask
  + return mask if java == mask else -java & 0xFFFFFFFF, mask
  tests/unit/format/test_hashing.py::test_min_value_becomes_zero
filter-without-fingerprints: a file's filter has only key hashes, but lookups ask for hash and fingerprint
  in Compaction._gathered
  - schema.item.fields["fingerprint"][1] if schema.keyed and schema.item.fields else -1
  + -1
  tests/unit/format/test_bloom.py::test_compacted_files_hold_the_filter_of_their_items
packed-run-without-its-end: a run that continues in the next piece loses its items of this piece
  in Compaction._written
  - low, waiting = high, items[end:]
  + low, waiting = high, items[len(items) :]
  tests/unit/format/test_packed.py::test_equals_lists_per_slot[NumPy]
skiplist-begin-exclusive: a scan misses a handle that ends in the range's first second
  in TimeRangeSkipList.overlapping
  - begin <= node.end and
  + begin < node.end and
  tests/property/test_skiplist.py::test_it_yields_what_a_sorted_list_yields
catalog-buried-too-early: for a moment the snapshot has neither a file nor its successor
  in Catalog._bury
  - node.until = self._generation + 1
  + node.until = self._generation
  tests/unit/service/test_buffer_flush_catalog.py::test_a_file_is_visible_at_every_moment_of_a_change[put]
catalog-snapshot-half-changed: a lookup sees a part of a log record's changes
  in Catalog._changed
  - if not self._is_changing:
  + if dispose is None:
  tests/unit/service/test_buffer_flush_catalog.py::test_a_snapshot_stays_as_it_was_taken
rest-of-a-deletion-listed: the rest of a deletion is listed, and readers, which ignore it, take it for deleted by hand
  in FileList.damaged
  - return None if is_rest else ListedFile(lane, 0)
  + return ListedFile(lane, 0)
  tests/faults/test_files_deleted_by_hand.py::test_the_rest_of_a_deletion_is_no_file_that_the_root_must_have
catalog-cut-is-bad-usage: a catalog that is shorter than the log says ends a check as a wrong call
  in Segments._read
  - except InvalidArgument as error:
  + except IndexError as error:
  tests/unit/service/test_catalogs.py::test_segments_of_other_catalogs_are_checked_beside_damaged_ones[cut]
files-left-out-of-one-index: an answer of several indexes is called complete although one of them left out files
  in merged
  - | any(index.answers.skipped for index in indexes)
  + | False
  tests/unit/service/several/test_one_order.py::test_an_index_that_leaves_files_out_makes_the_answer_truncated
catalog-begin-not-extended: a file's interval does not grow with late entries
  in Catalog.extend
  - begin, end = min(old.begin, handle.second_min),
  + begin, end = old.begin,
  tests/unit/service/test_buffer_flush_catalog.py::test_a_files_interval_grows_with_what_it_takes
batch-done-with-a-hole: a lookup of a batch ends although a block before its answers is unread
  in _GiantSlot.settle
  - np.logical_or.accumulate(unread, axis=0) & self._needing
  + np.logical_or.accumulate(unread & False, axis=0) & self._needing
  tests/unit/service/test_parts_of_lookups.py::test_what_was_read_behind_a_hole_does_not_make_a_page[True]
broken-index-is-an-empty-folder: an index below a prefix that lost its log is skipped as if it were empty
  in Child.open
  - if next(iter(self._backend.list(epoch_name(1))), None) is not None:
  + if self._backend is None:
  tests/unit/service/several/test_away.py::test_an_index_without_its_log_is_no_empty_folder
ties-of-sources-lost-between-pages: a page leaves out entries of a later source at the cursor's exact place
  in order_within_index
  - if number > last else column
  + if number < last else column
  tests/unit/service/several/test_one_order.py::test_pages_by_readers_of_other_orders_and_of_one_source_more[False-2]
complete-however-old: an answer is called complete although the log has not responded for hours
  in PolledState._problem
  - late_s > self._interval_s + _LATE_S
  + late_s > 1e9
  tests/unit/service/cold/test_logs_that_hang.py::test_one_that_may_make_no_request_is_not_complete_either
merge-window-border: no table gets the last second of a window
  in TableRun.add
  - piece.seconds < window.begin_s + window.window_s
  + piece.seconds < window.begin_s + window.window_s - 1
  tests/unit/service/merge/test_answers.py::test_files_that_straddle_windows[native]
archive-without-a-gap: an index of an archive lacks messages that no segment has, and nothing says so
  in ColumnLog.missing
  - if position < segment.start:
  + if position > segment.start:
  tests/unit/connectors/test_archived_log.py::test_a_range_without_a_segment_is_missing
archive-of-another-second: the message of another log is shown for an entry
  in _Look._take
  - abs(time_ms // 1000 - self.item.timestamp_ms // 1000) > CLOCK_STEP_S
  + False
  tests/unit/connectors/test_connector_messages.py::test_a_message_of_another_key_or_second_is_not_that_of_an_entry
kafka-archive-skips: the archive continues after the indexed records, although none of them is archived
  in KafkaArchiver._next_range
  - return max(begin, due), min(until, end)
  + return max(begin, due) if known is not None else until, min(until, end)
  tests/kafka/test_archive.py::test_records_that_were_indexed_before_are_read_again_for_the_archive
kafka-archive-of-another-log: records of a topic that was created again are archived as those of the old topic
  in KafkaArchiver._check_log
  - self.source.broker.topic_id(name.topic, self._stopped) != name.topic_id
  + not self.source.broker.topic_id(name.topic, self._stopped)
  tests/kafka/test_archive.py::test_a_log_that_is_made_again_while_it_is_archived_is_not_archived_as_the_one_before
kafka-archive-before-a-check: offsets that were put are archived before the log is known to be the one that was put
  in KafkaSource.settled
  - for partition in self._known() if partition.is_checked]
  + for partition in self._known()]
  tests/kafka/test_other_logs.py::test_nothing_is_archived_before_a_log_is_known_to_be_the_one_that_was_put
kafka-reads-behind-a-cut: a log that was cut and reaches the position again is read on from the position
  in KafkaSource._end_round
  - if partition.is_past_end:
  + if False:
  tests/kafka/test_other_logs.py::test_a_cut_log_that_reaches_the_position_while_it_is_taken_up_is_compared[40]
kafka-loses-a-late-answer: messages that a late call of the client returned are dropped
  in Consumer.consume
  - if call.result.done() and call.result.exception() is not None:
  + if True:
  tests/kafka/test_calls.py::test_messages_of_a_late_call_are_those_of_the_next_one_and_calls_keep_their_order
root-without-a-time: an answer from a root claims to have what its source got later
  in reads.py:bounds_of_root
  - return TopicBounds(times, has_all_put=True) if times else None
  + return None
  tests/kafka/test_read_whole.py::test_answers_of_a_root_have_the_time_of_its_last_run[True]
kafka-shows-collisions: a record of another key with an equal hash is shown as a match
  in RecordSearch.take
  - carried = self.key is None or carries(record, self.key)
  + carried = True
  tests/kafka/test_messages.py::test_a_colliding_key_is_never_shown_as_a_match[True]
kafka-range-of-an-error: the begin of a partition is read from an error response
  in range_in
  - int(answers[kafka.TopicPartition(*place)].result().offset) for answers in ranges
  + 0 if (one := answers[kafka.TopicPartition(*place)]).exception() else int(one.result().offset) for answers in ranges
  tests/kafka/test_faults.py::test_no_error_makes_the_range_of_a_partition_another_one[errors1]
""")
