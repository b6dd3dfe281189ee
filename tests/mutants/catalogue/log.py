"""Defects of who may write: fences, epochs, put-if-absent and its lost answers, leases, locks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

LOG = "tests/unit/service/test_log_and_lease.py"
CHECKPOINTS = "tests/unit/service/test_checkpoints.py"
WRITERS = "tests/faults/test_writers.py"
LEASE = f"{LOG}::test_a_lease_holds_off_other_roots_until_it_ends"

MUTANTS = (
    Mutant(
        "fence-forgotten", "a writer appends to the log past a higher epoch",
        "service/log/log.py", "if epoch is not None and state.epoch > epoch:", "if state.epoch < 0:",
        (f"{LOG}::test_a_higher_epoch_fences_the_lower_one",),
    ),
    Mutant(
        "fence-not-appended", "a writer that claims an epoch leaves no fence in the log",
        "service/log/log.py", '            self.append("fence", epoch, partial(_always, fence))\n', "            del fence\n",
        (f"{LOG}::test_a_higher_epoch_fences_the_lower_one",),
    ),
    Mutant(
        "exists-taken-for-a-win", "a lost number of the log is taken for one's own",
        "service/log/log.py", "if winner.attempt != attempt:", "if winner.attempt is None:",
        (f"{LOG}::test_a_number_that_was_lost_to_another_is_read_and_the_next_one_taken",),
    ),
    Mutant(
        "exists-taken-for-a-loss", "one's own record, whose first answer was lost, is taken for somebody else's",
        "service/log/log.py", "if winner.attempt != attempt:", "if winner.attempt is not None:",
        (f"{LOG}::test_a_claim_whose_answer_was_lost_is_recognised",),
    ),
    Mutant(
        "epoch-taken-for-a-loss", "one's own epoch, whose first answer was lost, is taken for somebody else's",
        "service/log/log.py", "if self._storage.get(epoch_name(epoch)) != attempt.encode():", "if attempt:",
        (f"{LOG}::test_a_claim_whose_answer_was_lost_is_recognised",),
    ),
    Mutant(
        "epoch-taken-for-a-win", "an epoch that somebody else has claimed is taken for one's own",
        "service/log/log.py", "if self._storage.get(epoch_name(epoch)) != attempt.encode():", "if not attempt:",
        (f"{LOG}::test_an_epoch_claimed_by_a_writer_that_died_before_its_fence_is_passed_over",),
    ),
    Mutant(
        "publish-repeated", "a record that is in the log already is appended once more",
        "service/log/log.py", "tuple(o for o in add if state.object_of(o.file_id) is None and o.file_id not in removed(state))", "add",
        (f"{WRITERS}::test_a_record_whose_answer_was_lost_is_there_once",),
    ),
    Mutant(
        "log-positions-go-back", "a record with smaller positions takes the log's positions back",
        "service/log/records.py",
        "max_positions(self._positions, record.positions)", "self._positions | record.positions",
        (f"{LOG}::test_states_are_folds_and_readers_keep_theirs",),
    ),
    Mutant(
        "checkpoint-forgets-positions", "a checkpoint does not hold the positions",
        "service/log/records.py", '"objects": [o.to_json() for o in self.objects.values()], "positions": self.positions,',
        '"objects": [o.to_json() for o in self.objects.values()], "positions": {},',
        (f"{LOG}::test_states_are_folds_and_readers_keep_theirs",),
    ),
    Mutant(
        "checkpoints-all-deleted", "a new checkpoint's sweep takes the new one, too",
        "service/log/log.py", "if number < kept[0]]", "if number]",
        (f"{CHECKPOINTS}::test_the_newest_two_are_kept_and_nothing_is_listed_for_it",),
    ),
    Mutant(
        "checkpoints-never-swept", "checkpoints of earlier writers stay for good",
        "service/log/log.py", "            self._sweep()\n", "",
        (f"{CHECKPOINTS}::test_what_short_lived_writers_leave_is_swept_by_the_next",),
    ),
    Mutant(
        "checkpoint-not-after-creation", "a new index has no checkpoint",
        "service/log/log.py", "            self._checkpoints.write(self._state)\n            return", "            return",
        (f"{CHECKPOINTS}::test_every_kind_of_record_counts",),
    ),
    Mutant(
        "checkpoint-failure-fatal", "a record fails for the checkpoint behind it",
        "service/log/log.py", "except (StorageError, DiskFull) as error:", "except TypeError as error:",
        (f"{CHECKPOINTS}::test_an_append_never_fails_for_a_checkpoint",),
    ),
    Mutant(
        "checkpoints-never-rarer", "each record of a large log writes the whole state once more",
        "service/log/log.py", "1 + self._size_bytes // _BYTES_A_RECORD", "1",
        (f"{CHECKPOINTS}::test_checkpoints_of_a_large_state_are_rarer",),
    ),
    Mutant(
        "checkpoints-listed-once", "a reader whose checkpoint is swept before it is read reads the whole log",
        "service/log/log.py", "_LISTINGS = 3", "_LISTINGS = 1",
        (f"{CHECKPOINTS}::test_a_checkpoint_that_is_swept_before_it_is_read",),
    ),
    Mutant(
        "checkpoint-number-unchecked", "a checkpoint that stands under another number is believed",
        "service/log/log.py", "if state.number != number:", "if state.number is None:",
        (f"{CHECKPOINTS}::test_a_damaged_checkpoint_is_not_one_of_the_two",),
    ),
    Mutant(
        "fold-shares-its-state", "a fold changes the state that it began with, under whoever reads at it",
        "service/log/records.py", "dict(self._objects), dict(self._archive), True", "self._objects, self._archive, True",
        (f"{CHECKPOINTS}::test_a_fold_leaves_the_state_it_began_with_as_it_was",),
    ),
    Mutant(
        "place-kept-after-removal", "a segment that was removed keeps its place in the log taken",
        "service/log/records.py", "                places.discard(segment.place)\n", "",
        (f"{CHECKPOINTS}::test_from_every_checkpoint_the_state_is_the_fold_of_all_records",),
    ),
    Mutant(
        "lease-honoured-too-long", "a lease holds in the millisecond in which it ends",
        "service/log/session.py", "holder.expires_ms <= clock.now_ms()", "holder.expires_ms < clock.now_ms()",
        (LEASE,),
    ),
    Mutant(
        "lease-honoured-too-short", "a lease ends after half of its time",
        "service/log/session.py", "round(self._ttl_s * 1000)", "round(self._ttl_s * 500)",
        (LEASE,),
    ),
    Mutant(
        "lease-renewed-too-late", "a lease is renewed only long after its end",
        "service/log/session.py", "self._ttl_s / 3", "self._ttl_s * 3",
        (LEASE,),
    ),
    Mutant(
        "lease-release-ignored", "a released lease holds others off until it ends",
        "service/log/session.py", "holder.released or ", "",
        (f"{LOG}::test_a_released_lease_holds_nobody_off",),
    ),
    Mutant(
        "lease-of-own-root", "a killed writer's root is locked out by its own lease",
        "service/log/session.py", "holder.root_id == root_id or ", "",
        (f"{WRITERS}::test_a_killed_writers_root_takes_over_at_once",),
    ),
    Mutant(
        "lease-not-asked", "an index is claimed whoever holds its lease",
        "service/log/session.py", "check_lease(self.storage, root_id, self._clock)", "pass",
        (f"{WRITERS}::test_another_root_waits_for_the_lease",),
    ),
    Mutant(
        "root-lock-shared", "two writers may have one root",
        "service/root/root.py", "fcntl.LOCK_EX", "fcntl.LOCK_SH",
        (f"{WRITERS}::test_a_root_has_one_writer",),
    ),
    Mutant(
        "another-index-accepted", "a root publishes into the storage of another index",
        "service/log/session.py", "if wanted.index_id and stored.index_id != wanted.index_id:", "if stored.index_id is None:",
        (f"{WRITERS}::test_a_storage_with_another_index_is_refused_also_when_it_comes_back_late",),
    ),
    Mutant(
        "probe-believes-the-answer", "a server that refuses a put and yet stores it passes the probe",
        "storage/opening.py", 'if storage.get(unique) == b"first":', 'if storage.get(unique):',
        ("tests/unit/storage/test_faults.py::test_the_probe_refuses_a_server_that_refuses_and_yet_stores",),
    ),
)  # fmt: skip
