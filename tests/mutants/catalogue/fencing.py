"""Defects of fencing: fences, epochs, put-if-absent with lost responses, leases and locks."""

from tests.mutants.mutant import parsed

MUTANTS = parsed(r"""
fence-forgotten: a writer appends to the log after a higher epoch
  in StorageLog.append
  - if epoch is not None and state.epoch > epoch:
  + if state.epoch < 0:
  tests/fencing/test_fencing.py::TestFencing::test_a_record_that_loses_its_number_to_a_fence_is_none[file]
fence-not-appended: a writer that claims an epoch leaves no fence in the log
  in StorageLog.claim_epoch
  - self.append("fence", epoch, lambda _: fence, attempt=attempt, writes_checkpoint=False)
  tests/fencing/test_fencing.py::TestFencing::test_a_lease_keeps_others_out_until_it_is_released[file]
exists-taken-for-a-win: a writer treats a lost log number as its own
  in StorageLog.append
  - if winner.attempt == attempt:
  + if winner.attempt is not None:
  tests/fencing/test_fencing.py::TestFencing::test_of_two_records_for_one_number_the_second_gets_the_next[file]
exists-taken-for-a-loss: a writer whose first response was lost treats its own record as another writer's
  in StorageLog.append
  - if winner.attempt == attempt:
  + if winner.attempt is None:
  tests/unit/service/test_log_and_lease.py::test_a_claim_whose_answer_was_lost_is_recognised
epoch-taken-for-a-loss: a writer whose first response was lost treats its own epoch as another writer's
  in StorageLog._puts_epoch
  - if self.storage.get(epoch_name(epoch)) != attempt.encode():
  + if attempt:
  tests/unit/service/test_log_and_lease.py::test_a_claim_whose_answer_was_lost_is_recognised
epoch-taken-for-a-win: a writer treats another writer's epoch as its own
  in StorageLog._puts_epoch
  - if self.storage.get(epoch_name(epoch)) != attempt.encode():
  + if not attempt:
  tests/unit/service/test_log_and_lease.py::test_an_epoch_claimed_by_a_writer_that_died_before_its_fence_is_passed_over
publish-repeated: a record that the log already has is appended again
  in publishing.make
  - tuple(o for o in add if state.object_of(o.file_id) is None and o.file_id not in removed(state))
  + add
  tests/faults/test_writers.py::test_a_record_that_arrives_late_does_not_publish_a_file_twice
lease-honoured-too-long: a lease is still valid in the millisecond in which it ends
  in LeaseWatch._left_s
  - max(age_ms, watched_ms) >= current.lease.ttl_ms
  + max(age_ms, watched_ms) > current.lease.ttl_ms
  tests/unit/service/test_log_and_lease.py::test_a_lease_holds_off_other_roots_until_it_ends
lease-release-ignored: a released lease keeps other writers out until it ends
  in LeaseWatch._left_s
  - current is None or current.lease.released or
  + current is None or
  tests/fencing/test_fencing.py::TestFencing::test_a_lease_keeps_others_out_until_it_is_released[file]
lease-of-own-root: a killed writer's own lease locks out its root
  in LeaseWatch._left_s
  - or current.lease.place == place
  + or False
  tests/fencing/test_fencing.py::TestFencing::test_a_root_and_an_index_have_one_writer_and_its_end_is_noticed[file]
lease-not-asked: a writer claims an index whose lease another writer holds
  in StorageSession.claim
  - self._watch.check(self.place, waits=waits)
  + pass
  tests/fencing/test_fencing.py::TestFencing::test_a_lease_keeps_others_out_until_it_is_released[file]
root-lock-shared: two writers may have one root
  in lock_file
  - fcntl.LOCK_EX
  + fcntl.LOCK_SH
  tests/faults/test_writers.py::test_a_root_has_one_writer
another-index-accepted: a root publishes into the storage of another index
  in check_descriptor
  - if wanted.index_id and stored.index_id != wanted.index_id:
  + if stored.index_id is None:
  tests/faults/test_writers.py::test_a_storage_with_another_index_is_refused_also_when_it_comes_back_late
host-beside-a-merge: a host publishes a file that a merge has taken
  in LifecycleContext.moved_files
  - return self.session.log.removed_files(state, after) -
  + return set() -
  tests/faults/test_unknown_outcomes.py::test_a_file_whose_record_arrived_and_that_was_merged_is_not_published_again
unknown-outcome-forgotten: a file whose record arrived late is published again after a merge has taken it
  in Lifecycle._upload
  - context.outcome_unknown.add(file_id)
  + pass
  tests/faults/test_unknown_outcomes.py::test_a_file_whose_record_arrived_and_that_was_merged_is_not_published_again
fenced-writer-accepts: a fenced writer still accepts puts
  in IndexService._check_writable
  - self._check_open()
  - if self._session.fenced is not None:
  + self._check_open()
  + if False:
  tests/fencing/test_fencing.py::TestFencing::test_a_writer_that_was_taken_over_publishes_nothing[file]
merge-publishes-what-is-gone: two merges of the same files are both published
  in service/jobs/rewriting/job.py:Rewrite.record
  - if gone := [name for name in names if name not in segments.state.objects]:
  + if (gone := [name for name in names if name not in segments.state.objects]) and not names:
  tests/unit/service/merge/test_readers_and_writers.py::test_of_two_merges_of_the_same_files_one_is_overtaken
earlier-file-shadows-its-object: a reader of a root shows an earlier state of a file instead of its object
  in service/read/index_view.py:_backed
  - return stored if local.count < stored.count else local
  + return local
  tests/faults/test_restores.py::test_what_was_restored_is_said_and_its_entries_are_kept[an earlier file]
file-of-a-clone-shadows-its-object: a reader of a root shows a file of a clone instead of the object with its id
  in exceeds
  - return local.count > later.count or not is_inside
  + return local.count > later.count
  tests/faults/test_restores.py::test_what_was_restored_is_said_and_its_entries_are_kept[a file, unsealed, as many]
catalog-forgets-what-was-retired: a segment that was replaced during a merge of catalogs is shown again
  in CatalogRewrite.record
  - generation=self.generation)
  + generation=None)
  tests/unit/service/test_catalogs.py::test_a_segment_that_is_replaced_during_a_merge_of_objects_stays_replaced
build-published-twice: a build publishes again although its record was stored and the response lost
  in publish_tables.make
  - if added <= state.objects.keys():
  + if not added:
  tests/spark/test_publishing.py::test_a_driver_that_is_killed_at_any_call_leaves_the_old_state_or_the_new_one
merge-published-twice: a merge whose record was stored, but the response lost, fails as if overtaken
  in service/jobs/rewriting/job.py:publish.make
  - if any(is_named(state, stored.name) for stored in sent) or not
  + if not
  tests/unit/service/merge/test_readers_and_writers.py::test_publishing_again_after_an_unknown_outcome_finds_its_own_record
expiry-by-a-fenced-writer: a fenced writer expires entries by its own rule
  in record_expiry
  - log.append("the expired times", epoch, make)
  + log.append("the expired times", None, make)
  tests/unit/service/test_expiry.py::test_a_fenced_writer_expires_nothing
copy-over-a-writer: a standby continues on a target that a writer has taken over
  in Copier._check_target
  - if last.kind != _KIND:
  + if copy_state.epoch > 99:
  tests/unit/service/copies/test_copies.py::test_a_target_that_was_written_to_is_let_alone
s3-put-if-absent-unconditional: put-if-absent sends no condition
  in S3Storage.put_if_absent
  - self._writes.put(name, self._key(name), data, IfNoneMatch="*")
  + self._writes.put(name, self._key(name), data)
  tests/storage/test_s3_answers.py::test_put_if_absent_sends_the_condition_and_reads_412
local-put-if-absent-renames: put-if-absent overwrites an object that appeared meanwhile
  in _LocalWriter._name
  - self._disk.link(temporary, self._target)
  + self._disk.rename(temporary, self._target)
  tests/storage/test_local_crashes.py::test_an_object_that_appears_during_a_put_if_absent_is_kept
sqlite-put-if-absent-replaces: put-if-absent replaces an object that appeared meanwhile
  in SqliteStorage.insert
  - if self._remove(name, database) is not None and if_absent:
  + if self._remove(name, database) is not None and False:
  tests/storage/test_sqlite_files.py::test_an_object_that_exists_is_refused_with_all_its_rows
grown-file-dropped: a file is dropped because its object was merged, although that lacked its newest entries
  in Lifecycle._let_go
  - context.check_moved(file)
  + pass
  tests/faults/test_restores.py::test_what_was_restored_is_said_and_its_entries_are_kept[a grown file that was retired]
grown-file-hidden: a reader shows the later form of a file that lacks entries of the earlier one
  in RootView._check_forms
  - CompactedFile) and exceeds(view, later):
  + CompactedFile) and False:
  tests/faults/test_restores.py::test_what_was_restored_is_said_and_its_entries_are_kept[a grown file that was merged]
another-history-swept: a writer deletes objects of another history that was mixed into its storage
  in find_orphans
  - log.check_unmixed(again=True)
  + pass
  tests/faults/test_restores.py::test_what_was_restored_is_said_and_its_entries_are_kept[shorter, keeping times]
""")
