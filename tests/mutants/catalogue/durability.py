"""Defects of durability: syncs, their order, recovery, uploads, and deletions after them."""

from tests.mutants.mutant import parsed

MUTANTS = parsed(r"""
disk-fdatasync-dropped: a sync of a file never reaches the system
  in Disk.sync
  - os.fdatasync(descriptor)
  + pass
  tests/unit/storage/test_disk.py::test_syncs_reach_the_system
disk-folder-fsync-dropped: a sync of a folder never reaches the system
  in Disk.sync_folder
  - os.fsync(descriptor)
  + pass
  tests/unit/storage/test_disk.py::test_syncs_reach_the_system
disk-space-only-promised: the next file's space is a hole without blocks, so that a full disk fails later
  in Disk.allocate
  - os.posix_fallocate(descriptor, start, size_bytes)
  + os.ftruncate(descriptor, start + size_bytes)
  tests/unit/storage/test_disk.py::test_reserved_space_is_really_taken
disk-rename-before-sync: a compacted file gets its name before its bytes are durable
  in Disk.write_file
  - self.sync(descriptor)
  tests/storage/test_local_crashes.py::test_a_published_file_is_whole_after_a_power_cut
disk-publish-without-folder-sync: a published file's name is not durable when its predecessor is deleted
  in Disk.publish
  - self.rename(temporary, target)
  -         self.sync_folder(target.parent)
  + self.rename(temporary, target)
  tests/reliability/test_crashes.py::test_every_crash[lifecycle]
append-entries-unsynced: the journal confirms entries that were not synced
  in UnsealedFile.append
  - self._disk.sync(self._descriptor)
  + pass
  tests/reliability/test_crashes.py::test_every_crash[writing]
append-journal-unsynced: a flush returns before the journal's record is durable
  in UnsealedFile.append
  - self._disk.pwrite(self._journal_descriptor, log, self.journal.valid_length)
  -         self._disk.sync(self._journal_descriptor)
  + self._disk.pwrite(self._journal_descriptor, log, self.journal.valid_length)
  tests/reliability/test_crashes.py::test_every_crash[writing]
append-journal-before-entries: the journal's record is written before the entries that it confirms
  in UnsealedFile.append
  - for piece in batch.pieces():
  + for piece in batch.pieces():
  +     crc = crc32(piece, crc)
  + log = encode_batch(BatchRecord(batch.first, len(batch), crc, low, high, batch.end_ms), positions, fresh, documents)
  + self._disk.pwrite(self._journal_descriptor, log, self.journal.valid_length)
  + crc = 0
  + for piece in batch.pieces():
  tests/reliability/test_crashes.py::test_every_crash[writing]
begin-folder-unsynced: a new file accepts entries before its name is durable
  in UnsealedFile.begin
  - disk.sync_folder(root.folder(UNSEALED))
  tests/reliability/test_crashes.py::test_every_crash[writing]
append-goes-on-after-failed-sync: a file accepts more entries after a failed sync
  in UnsealedFile.append
  - self.failed = True  # until the last line
  + pass
  tests/faults/test_disks.py::test_after_a_failed_sync_a_file_takes_no_more_and_its_entries_go_to_the_next_one
append-visible-before-durable: a batch is counted and can be found before it is durable
  in UnsealedFile.append
  - for piece in batch.pieces():
  + self.table.commit(batch)
  + for piece in batch.pieces():
  +     crc = crc32(piece, crc)
  + self.journal.batches.append(BatchRecord(batch.first, len(batch), crc, low, high, batch.end_ms))
  + crc = 0
  + for piece in batch.pieces():
  tests/faults/test_disks.py::test_after_a_failed_sync_a_file_takes_no_more_and_its_entries_go_to_the_next_one
recovery-trusts-what-it-reads: a journal's last record counts as durable although its sync may have failed
  in UnsealedFile.recover
  - root.disk.pwrite(journal_descriptor, data[: journal.valid_length], 0)
  + pass
  tests/faults/test_disks.py::test_recovery_writes_again_what_a_failed_sync_may_not_have_written
given-up-half: an abandoned file is deleted although its journal may have entries
  in drop_unbegun
  - _rewrite(root, journal_path, begun)
  + pass
  tests/faults/test_disks.py::test_a_file_that_is_given_up_is_nothing_to_a_reader_however_far_its_deletion_went
compact-deletes-first: the unsealed file is deleted before its compacted form has its name
  in Lifecycle._compact
  - root.write_file(target, self._renewing(pieces), f"compacting
  + root.disk.unlink(file.journal_path)
  + root.disk.unlink(file.path)
  + root.write_file(target, self._renewing(pieces), f"compacting
  tests/reliability/test_crashes.py::test_every_crash[lifecycle]
local-put-name-unsynced: an object's name is not durable when the put returns
  in _LocalWriter._name
  - self._disk.sync_folder(self._target.parent)
  + pass
  tests/storage/test_local_crashes.py::test_a_crash_or_a_power_cut_at_any_call_leaves_old_or_new[put_if_absent-before]
local-folder-unsynced: an object's folder is not durable when the put returns
  in LocalStorage._make_folder
  - # Also for an existing folder: another process may have made it without syncing its parent yet.
  - self._disk.sync_folder(folder.parent)
  tests/storage/test_local_crashes.py::test_the_name_of_every_folder_is_synced_also_if_another_process_made_it[False]
local-delete-unsynced: a deleted object can come back after a power cut
  in LocalStorage.delete_many
  - self._sync_removed(parent)
  + pass
  tests/storage/test_local_crashes.py::test_a_crash_or_a_power_cut_at_any_call_leaves_old_or_new[delete-before]
sqlite-commit-unsynced: a commit does not wait for the disk
  in _Connection._opened
  - database.execute(f"PRAGMA {pragma}")
  + database.execute(f"PRAGMA {pragma}".replace("FULL", "NORMAL"))
  tests/storage/test_sqlite_locks.py::test_a_commit_waits_for_the_disk
recovery-keeps-temporaries: temporary files of a crash are never deleted
  in _Recovery.run
  - for path in temporaries:
  + for path in temporaries[:0]:
  tests/reliability/test_crashes.py::test_every_crash[writing]
recovery-prefers-unsealed: if a file is both unsealed and compacted, recovery keeps the earlier state, too
  in _Recovery._recover_unsealed
  - state is not None and file_id not in local and self._has_newer_journal(file_id, state)
  + path.exists() or state is not None and file_id not in local and self._has_newer_journal(file_id, state)
  tests/unit/service/test_uploads.py::test_an_unsealed_form_that_came_back_is_dropped[compacted]
recovery-trusts-compacted: an unsealed file is dropped although the items of its compacted form fail the check
  in _Recovery._recover_compacted
  - verify_runs(file)
  tests/faults/test_damage.py::test_a_damaged_compacted_file_is_made_again_from_its_unsealed_form
recovery-drops-before-the-name: an unsealed file is dropped before the name of its compacted form is durable
  in _Recovery._recover_unsealed
  - root.disk.sync_folder(root.folder(COMPACTED))
  tests/faults/test_disks.py::test_a_compacted_file_has_its_name_before_a_recovery_drops_the_unsealed_one
recovery-believes-short-journal: a journal that lacks durable entries counts as a short file
  in _Recovery._recover_unsealed
  - claims.get(file_id, 0)
  + 0
  tests/faults/test_damage.py::test_what_a_journal_lost_is_damage_where_a_younger_file_is
recovery-forgets-damage: recovery leaves out an unreadable file, so that answers are short without an error
  in _Recovery._recover_unsealed
  - self._add_damaged(file_id, UNSEALED, typed, journal.seconds if journal is not None else None)
  + del typed
  tests/faults/test_damage.py::test_a_damaged_unsealed_file_fails_the_lookups_that_meet_it_and_is_kept
recovery-forgets-positions: durable positions of unsealed files are lost at a restart
  in _Recovery.run
  - recovered.positions = max_positions(recovered.positions, own_positions(file))
  + if not isinstance(file, UnsealedFile):
  +     recovered.positions = max_positions(recovered.positions, own_positions(file))
  tests/unit/service/test_buffer_flush_catalog.py::test_positions_survive_every_file
recovery-chains-not-rebuilt: a recovered file has entries, but no chain leads to them
  in UnsealedTable.load
  - self._show_heads(hashes)
  -         self.end_ms
  + self.end_ms
  tests/reliability/test_crashes.py::test_every_crash[writing]
reader-forgets-damage: a reader beside the writer leaves out an unreadable unsealed file
  in RootView._find_unsealed
  - except (TieredIndexError, ValueError) as error:
  + except (TieredIndexError, ValueError) as error:
  +     return True
  tests/faults/test_damage.py::test_a_damaged_journal_fails_a_readers_lookups_too
lives-gap-while-flushed: entries leave the buffer before a file shows them
  in Flusher._run_round
  - try:
  -     for appender, run in current:
  + self.buffer.end_flush()
  + try:
  +     for appender, run in current:
  tests/golden/test_faults_of_rocketmq.py::test_a_flush_that_wrote_nothing_raises
positions-lost-on-retire: a local copy is deleted although nothing else states a source's position
  in Lifecycle._retirable
  - if file.file_id in needed:
  + if needed is None:
  tests/unit/service/test_buffer_flush_catalog.py::test_a_local_copy_stays_while_it_alone_says_a_position
kept-log-older-than-a-deletion: the root's old log stays although a later one can't be written
  in KeptLog.keep
  - self._root.disk.unlink(self.path)
  + pass
  tests/unit/service/test_kept_log.py::test_a_failing_disk_keeps_none_rather_than_an_earlier_one
retired-though-the-object-is-cut: the local copy is deleted although the storage's object has another size
  in Lifecycle._retire
  - check_size(self._context.session.storage, stored, "its local copy")
  + assert stored is not None
  tests/unit/service/test_uploads.py::test_a_local_copy_stays_while_its_object_is_not_whole
retention-before-the-log: a file counts as uploaded before the log names its object
  in Lifecycle._upload
  - make = publishing(session.epoch
  + self._move(file)
  + make = publishing(session.epoch
  tests/unit/service/test_uploads.py::test_a_file_is_not_taken_for_uploaded_before_the_log_names_it
positions-ahead-of-quarantine: the log states positions while entries wait in quarantine
  in LocalFiles.durable_positions
  - h.lane == QUARANTINE or h.sequence
  + h.sequence
  tests/unit/service/test_buffer_flush_catalog.py::test_the_logs_positions_never_run_ahead_of_entries_in_quarantine
buffer-accepts-in-part: a refused call leaves its entries in the buffer
  in WriteBuffer.append_columns
  - self._admit(count, size_bytes)
  + self._append(Chunk(self._newest + 1, count, size_bytes, marks, columns), self.open)
  + self._admit(count, size_bytes)
  tests/faults/test_bounds.py::test_a_call_that_would_pass_the_buffers_bound_is_refused_whole
position-goes-back: a repeated message of a source decreases its position
  in Marks.add
  - max(position, self.positions.get(source, position))
  + position
  tests/unit/service/test_plain_puts.py::test_a_position_never_goes_back[general]
mark-before-its-last-entry: a full file states the position of a message whose last entry is in the next file
  in PutRows.extend
  - self._marks.add(len(self.keys), source, position)
  + self._marks.add(len(self.keys) - 1, source, position)
  tests/unit/service/test_plain_puts.py::test_a_position_is_that_of_whole_messages[general]
checked-source-of-a-follower: a program's put moves the position of a source that the index follows
  in IndexService.put
  - check_position_name(source, self._topics.connectors)
  + source = str(source)
  tests/unit/service/test_plain_puts.py::test_a_source_that_the_index_follows_is_not_known_by_its_batches[general]
buffer-released-before-durable: a failed flush drops the entries that it did not write
  in Flusher._run_round
  - self.error = error
  - raise
  + self.error = error
  + self._round = None
  + self.buffer.end_flush()
  + raise
  tests/golden/test_faults_of_rocketmq.py::test_a_flush_that_wrote_nothing_raises
positions-before-flush: a position counts as durable before its entries are
  in Flusher._run_round
  - self._round = self._begin()
  + self._round = self._begin()
  + self.positions = max_positions(self.positions, self._round[-1][1].positions)
  tests/golden/test_faults_of_rocketmq.py::test_unconfirmed_entries_are_not_promised_after_a_crash
positions-with-the-first-piece: a batch's position is durable with its first piece, not with its last
  in Appender.write
  - positions = run.positions if last else run.marks.positions_at(stop)
  + positions = run.positions
  tests/reliability/test_crashes.py::test_every_crash[writing]
log-positions-go-back: a record with smaller positions decreases the log's positions
  in LogReplay.add
  - positions = max_positions(now.positions, record.positions)
  + positions = now.positions | record.positions
  tests/unit/service/test_checkpoints.py::test_from_every_checkpoint_the_state_is_the_fold_of_all_records
sqlite-rows-outside-their-transaction: a kill leaves rows of an object that was not named
  in SqliteStorage.insert
  - database.execute("INSERT INTO objects VALUES (?, ?, ?, ?)",
  + database.execute("COMMIT"), database.execute("INSERT INTO objects VALUES (?, ?, ?, ?)",
  tests/storage/test_sqlite_crashes.py::test_a_kill_at_any_statement_leaves_old_or_new[put]
writer-shows-half-an-object: an object appears although its writer failed in the middle
  in Writer.__exit__
  - self.abort()
  + self.close()
  tests/storage/test_conformance.py::TestMemoryStorage::test_a_writer_that_is_not_closed_leaves_nothing[error-5]
local-stream-unsynced: the last bytes of a large object are named before they are durable
  in _LocalWriter._send_part
  - self._disk.sync(self._open[1])
  tests/storage/test_local_crashes.py::test_a_crash_or_a_power_cut_at_any_call_leaves_old_or_new[stream-before]
orphans-of-any-age: uploads in progress are deleted before they can be published
  in find_orphans
  - if info.modified_ms < before_ms or info.name in over]
  + if info.modified_ms <= now_ms]
  tests/unit/service/merge/test_readers_and_writers.py::test_orphans_are_what_nobody_names_and_old_enough
archived-copy-ends-a-repair: a copy in an archive class keeps the other objects from their repair
  in service/jobs/repair.py:_archived_is_noted
  - except ObjectArchived as error:
  + except ZeroDivisionError as error:
  tests/faults/test_rules_of_buckets.py::test_a_repair_tells_of_an_archived_copy_and_repairs_the_rest[segment]
orphans-of-an-old-log: objects that were published during a sweep are deleted
  in unnamed
  - state = log.refresh()
  + state = earlier or log.refresh()
  tests/unit/service/merge/test_readers_and_writers.py::test_what_is_published_while_a_sweep_looks_is_no_orphan
expiry-deletes-before-the-record: objects are deleted while the log still names them
  in record_expiry.make
  - return LogRecord(0, "expire", epoch or 0, "", 0, remove=names, expired=plan.expired, expiry_ms=now_ms)
  + log.storage.delete_many(names)
  + return LogRecord(0, "expire", epoch or 0, "", 0, remove=names, expired=plan.expired, expiry_ms=now_ms)
  tests/unit/service/test_expiry.py::test_bytes_stay_for_the_grace
expiry-by-a-clock-that-jumped: a wrong clock expires all entries for good
  in TrustedTime._check
  - if now_ms - last_ms > most_ms:
  + if now_ms - last_ms > 1000 * most_ms:
  tests/unit/service/test_clocks.py::test_a_jump_of_clocks_expires_nothing
copy-publishes-before-the-last-object: the record names an object that is not there yet
  in Copier._send
  - for future in [pool.submit(self._bring, named) for named in parts]:
  + if not self.copied.state.number:
  +     self._publish(self.log.state)
  + for future in [pool.submit(self._bring, named) for named in parts]:
  tests/unit/service/copies/test_copies.py::test_a_crash_at_any_step_leaves_no_target_or_a_complete_one
merge-of-part-of-a-source: a source that was only partly read is removed as a whole
  in Rewrite.check_proof
  - problem, stored.count, read)
  + problem, stored.count, max(stored.count, read))
  tests/unit/service/merge/test_readers_and_writers.py::test_results_that_do_not_add_up_are_not_published
job-ends-as-if-done: a job that others overtook ends as if it had done its work
  in Job.outcomes
  - except JobOvertaken:
  -     is_overtaken = True
  + except JobOvertaken:
  tests/unit/service/test_job.py::test_it_gives_up_after_ten_plans_that_others_overtook
merge-keeps-its-sources: the record adds the tables and leaves the files
  in service/jobs/rewriting/job.py:Rewrite.record
  - add, names, left_out=
  + add, names[1:], left_out=
  tests/unit/service/merge/test_answers.py::test_files_that_straddle_windows[native]
catalog-reclaim-under-a-reader: a file is deleted while an older lookup may need it
  in Catalog._oldest
  - min(list(self._readers.values()), default=self._generation)
  + self._generation
  tests/unit/service/test_buffer_flush_catalog.py::test_what_a_running_query_may_need_is_kept
join-beside-an-erasure: small archived files are joined as they were before an erasure wrote one of them again
  in JoinRewrite.record
  - if segments.at(*segment.place) != segment:
  + if segments.at(*segment.place) is None:
  tests/unit/connectors/test_joined_archive.py::test_an_erasure_that_is_faster_is_planned_again
archive-beside-the-joined-file: a file whose record had an unknown outcome is archived again after it was joined
  in SegmentUploads.send
  - is_there = known is not None and (known.start == source.start or known.end >= source.end)
  + is_there = known is not None and known.start == source.start
  tests/unit/connectors/test_joined_archive.py::test_a_file_whose_record_came_late_is_not_archived_beside_the_joined_one[known]
archive-again-what-was-joined: a late record is repeated although its segment was joined meanwhile
  in SegmentUploads._name
  - return [self._segments(state).holding(*segment.place) for segment in places_of]
  + return [self._segments(state).at(*segment.place) for segment in places_of]
  tests/unit/connectors/test_joined_archive.py::test_a_file_whose_record_came_late_is_not_archived_beside_the_joined_one[unknown]
join-over-the-damage: a joined file lacks the messages of a damaged file between others
  in JoinTask.run
  - if tables and (table is None or not _fits(tables, table)):
  + if tables and table is not None and not _fits(tables, table):
  tests/unit/connectors/test_joined_archive.py::test_a_damaged_file_is_named_and_those_beside_it_are_joined
""")
