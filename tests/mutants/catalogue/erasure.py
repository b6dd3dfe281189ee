"""Defects of erasure: tombstones, horizons, rewritten segments and certificates."""

from tests.mutants.mutant import parsed

MUTANTS = parsed(r"""
erase-the-neighbour-queue: a merge leaves out all queues of a topic although only one was erased
  in HiddenOf.states
  - states[(queues == queue_id) & (seconds < begin)] = HIDDEN
  + states[seconds < begin] = HIDDEN
  tests/unit/service/test_erase.py::test_it_is_hidden_in_every_state_and_goes_with_the_next_merge[native-queue]
erase-the-neighbour-key: a merge leaves out keys with another fingerprint
  in HiddenOf.begins_of
  - alike = of_any if fingerprints is None else of_any | (self.fingerprints[places] == fingerprints[met])
  + alike = of_any | True
  tests/unit/service/test_erase.py::test_a_key_of_an_equal_hash_goes_too_without_fingerprints
erase-the-neighbour-topic: a merge leaves out entries of other topics from before that time
  in Expired.keeps
  - is_shown = seconds >= np.array([of_topic.begin_s for of_topic in of_topics])[index]
  + is_shown = seconds >= max(of_topic.begin_s for of_topic in of_topics)
  tests/unit/service/test_erase.py::test_it_is_hidden_in_every_state_and_goes_with_the_next_merge[native-topic]
erased-shown-by-window-tables: a lookup shows erased entries of a window table
  in LookupScan.look
  - under_rule = of_rule.hiding(self.hidden, self.replaced)
  + under_rule = of_rule if type(handle).__name__ == "WindowTable" else of_rule.hiding(self.hidden, self.replaced)
  tests/unit/service/test_erase.py::test_it_is_hidden_in_every_state_and_goes_with_the_next_merge[native-key]
erased-shown-of-a-queue: a lookup shows entries of an erased queue
  in LookupBatch._leave_hidden
  - keep[mine] = states == SHOWN
  + keep[mine] = states != RETIRED
  tests/unit/service/test_erase.py::test_it_is_hidden_in_every_state_and_goes_with_the_next_merge[native-queue]
erased-shown-behind-a-cursor: a further page shows entries of an erased queue
  in LookupBatch._leave_hidden
  - for number, of_topic in enumerate(self.hidden):
  + for number, of_topic in enumerate(() if self.after else self.hidden):
  tests/unit/service/test_erase.py::test_it_is_hidden_in_every_state_and_goes_with_the_next_merge[native-queue]
erased-shown-by-lookups: a lookup shows erased entries whose bytes are still there
  in QueryEngine._search
  - scan.hidden = files.hidden
  + scan.hidden = None
  tests/unit/service/test_erase.py::test_it_is_hidden_in_every_state_and_goes_with_the_next_merge[native-key]
erased-shown-by-exports: merges and exports keep erased entries
  in Expired.keeps
  - if self.hidden is None or not len(seconds):
  + if len(seconds) >= 0:
  tests/unit/service/test_erase.py::test_an_export_and_the_topics_leave_it_out
erase-deletes-before-the-record: objects are deleted while the log still names them
  in _record.make
  - return LogRecord(0, "erase", 0, "", 0, remove=tuple(names), expired=gone)
  + log.storage.delete_many(names)
  + return LogRecord(0, "erase", 0, "", 0, remove=tuple(names), expired=gone)
  tests/unit/service/test_erase.py::test_a_storage_that_fails_at_any_call_leaves_the_old_answer_or_the_new_one
erase-removes-a-table-for-one-shard: a window table is removed as a whole because one shard has only erased entries
  in names_of_nothing_else
  - for group in groups(state) if all(map(is_hidden, group))
  + for group in groups(state) if any(map(is_hidden, group))
  tests/unit/service/test_erase.py::test_a_table_of_which_one_shard_is_erased_stays
erase-trusts-what-it-could-not-read: the certificate says erased although an object can't be read
  in _Erasing.certificate
  - if scan.hidden or scan.problem)),
  + if scan.hidden)),
  tests/unit/service/test_erase.py::test_the_certificate_tells_what_remains
linked-by-entries-alone: the certificate names no linked files whose entries are gone
  in service/jobs/erase.py:_linked
  - if is_gone or not is_known or linked.end > reached:
  + if not is_known or linked.end > reached:
  tests/unit/service/test_catalogs.py::test_the_certificate_names_linked_files_of_keys_that_are_partly_in_force
linked-before-the-upload: the certificate names no linked files whose entries are not uploaded yet
  in service/jobs/erase.py:_linked
  - if is_gone or not is_known or linked.end > reached:
  + if is_gone or not is_known:
  tests/unit/service/test_catalogs.py::test_the_certificate_names_linked_files_of_stores_without_a_topic_and_of_rows_that_are_not_uploaded
merge-of-catalogs-that-forgets: a merge of catalogs may lose segments without a finding
  in _problem_of_catalogs
  - if removed != added + record.left_out:
  + if removed < added + record.left_out:
  tests/unit/service/test_catalogs.py::test_records_that_lose_segments_of_catalogs_are_findings[catalogs-2-1-False]
lost-catalog-at-once: a sweep deletes the objects of a lost catalog's segments at once
  in names_removed_by
  - names += [name for lost in ranges for name in _objects_in(log, lost) if not segments.names_object(name)]
  + pass
  tests/unit/service/test_catalogs.py::test_a_catalog_that_is_given_up_takes_its_segments_with_it_and_nothing_else[missing]
tombstones-forgotten-by-others: a tombstone replaces one that reaches further
  in Tombstone.covers
  - and self.before_ms >= other.before_ms
  tests/unit/service/test_erase.py::test_what_others_cover_is_dropped_and_their_number_is_bounded
erased-segment-over-another: a segment replaces one that was rewritten meanwhile, so that its erased messages return
  in SegmentRewrite.record
  - if old is not None and old.name in names
  + if old is not None
  tests/rocketmq/test_archive_erased.py::test_of_two_that_rewrite_one_segment_at_once_the_second_goes_on_from_there
erased-segment-of-fewer-records: a columnar segment is replaced by one that lacks more records than were erased
  in SegmentRewrite.check_proof
  - CorruptFile.unless_equal(fresh.name, problem, before.rows - gone, fresh.rows)
  + pass
  tests/unit/service/test_catalogs.py::test_segments_that_do_not_add_up_are_not_published
erased-segment-that-nobody-read: the certificate says erased although a segment can't be read
  in _Tally.add
  - if result.remains or result.found.problem is not None:
  + if result.remains:
  tests/rocketmq/test_archive_erased.py::test_a_segment_that_can_not_be_read_is_not_written_again_and_remains[lost]
erased-by-not-looking: the certificate says erased although the messages may be in unread archived segments
  in _Erasing.certificate
  - or (segments and not now))
  + )
  tests/rocketmq/test_archive_erased.py::test_without_now_archived_messages_are_hidden_and_not_erased
erased-messages-of-other-keys: messages of other keys are overwritten
  in MessagesToErase._patches
  - if self.request.keys:
  + if self.request.keys and not len(places):
  tests/rocketmq/test_archive_erased.py::test_what_a_request_finds_is_told_by_the_real_key
erased-rows-of-other-times: archived rows are erased that are newer than the erasure
  in ColumnsToErase.__call__
  - pc.less(times_ms, self._before_ms)
  + pc.less_equal(times_ms, self._before_ms)
  tests/unit/service/test_columnar_erasure.py::test_messages_go_by_key_queue_topic_and_time[kafka]
erased-without-all-keys: a file that lacks keys is searched for a key, and the certificate says erased
  in ColumnsToErase.__call__
  - return FoundMessages(problem=f"{segment.name} {keys}: erase the queue, or the topic")
  + return FoundMessages()
  tests/unit/service/test_columnar_erasure.py::test_a_file_that_can_not_be_read_or_lacks_keys_is_a_problem[kafka]
copies-of-erased-messages: an index of an archive has copies of messages that were erased
  in ColumnCopies.add
  - (records[NUMBER].to_numpy() >= begin) & ~erased
  + records[NUMBER].to_numpy() >= begin
  tests/unit/connectors/test_archived_log.py::test_files_are_copied_once_without_what_was_erased
erase-with-two-moments: messages that came during the erasure are overwritten, but their entries stay
  in service/jobs/erase.py:erase
  - sought = messages(erasing.stones[0].before_ms, erasing.schema.keyed)
  + sought = messages(clock.now_ms() // 1000 * 1000 + 1000, erasing.schema.keyed)
  tests/rocketmq/test_archive_erased.py::test_tombstones_and_overwritten_messages_are_of_one_moment
erase-hides-collisions: the certificate does not count the removed entries of other keys
  in EraseRequest.collisions
  - int((alike & ~sought).sum())
  + int((alike & sought).sum() * 0)
  tests/rocketmq/test_archive_erased.py::test_entries_of_keys_that_collide_are_counted_and_their_messages_stay
expiry-goes-back: a longer rule shows expired entries again
  in Expired.joined
  - if horizon.latest and not any(known.has(horizon) for known in horizons):
  -     horizons = (*(known for known in horizons if not horizon.has(known)), horizon)
  + horizons = (horizon,)
  tests/unit/service/test_retention.py::test_what_has_expired_stays_so_whatever_a_later_rule_says
expiry-lost-in-checkpoints: a reader that opens by a checkpoint shows expired entries
  in service/log/state.py:_with_ranges
  - if record.expired != NOTHING:
  + if record.expired == NOTHING:
  +     expired = NOTHING
  + else:
  tests/unit/service/test_expiry.py::test_what_is_stated_outlives_checkpoints
expiry-forgets-the-grace: bytes are deleted though readers may still read them
  in service/jobs/orphans.py:sweep
  - removed_s=grace_s,
  + removed_s=3600.0,
  tests/unit/service/test_expiry.py::test_bytes_stay_for_the_grace
quiet-copy-keeps-bytes: a timer's copies keep the bytes that a source erased before it became quiet
  in Copier.may_sweep
  - return self.target.now_ms() - removed_ms >= grace_s * 1000
  + return False
  tests/integration/cli/test_copy.py::test_a_run_by_a_timer_sweeps_the_copy_only_if_there_may_be_something_to_delete
settled-record-is-young: each start of a job in a folder puts off the deletion of what the last record removed
  in LocalStorage.settle
  - os.utime(self._path(name), ns=(before.modified_ms * 1_000_000,) * 2)
  + pass
  tests/integration/cli/test_copy.py::test_a_run_by_a_timer_sweeps_the_copy_only_if_there_may_be_something_to_delete
""")
