"""Defects of following a store: positions, the end of a live log, logs that change, lag; and of importing a classic
index.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

DISPATCHER = "tests/rocketmq/test_dispatcher.py"
COLUMNS = "tests/rocketmq/test_index_columns.py"
MESSAGE = "tests/rocketmq/test_message.py"
END = "tests/rocketmq/test_dispatcher_end.py"
INDEX = "tests/rocketmq/test_dispatcher_index.py"
FINGERPRINTS = "tests/rocketmq/test_fingerprints.py"
REWRITTEN = "tests/rocketmq/test_dispatcher_rewritten.py"
UNMOUNTED = "tests/rocketmq/test_dispatcher_unmounted.py"
CLOSED = "tests/rocketmq/test_dispatcher_closed.py"
STORE = "tests/rocketmq/test_store.py"
IMPORT = "tests/integration/cli/test_import_classic.py"
FOLLOWING = "tests/unit/cli/test_following.py"

MUTANTS = (
    Mutant(
        "follow-starts-over",
        "every start takes the log from its beginning",
        "rocketmq/follow/dispatcher.py",
        "if restart or durable is None:",
        "if True:",
        (f"{DISPATCHER}::test_a_restart_goes_on_at_the_durable_position_and_repeats_nothing_in_answers",),
    ),
    Mutant(
        "follow-two-stores",
        "a second store is mixed into the index without a word",
        "rocketmq/follow/dispatcher.py",
        "if known and source not in known and not restart:",
        "if False:",
        (f"{INDEX}::test_one_index_is_of_one_store",),
    ),
    Mutant(
        "follow-believes-the-first-reading",
        "messages read while they were written are put with holes",
        "rocketmq/follow/tail.py",
        "if not batch.messages or stable.covers(batch):",
        "if True:",
        (f"{END}::test_what_was_read_with_holes_while_it_was_written_is_read_again[2]",),
    ),
    Mutant(
        "follow-proves-too-much",
        "what is ahead of the reading counts as written before it, whatever stands there",
        "rocketmq/follow/tail.py",
        " if any(data[:_PAGE]) else NOTHING",
        "",
        (f"{END}::test_a_message_cut_anywhere_waits_until_it_is_whole",),
    ),
    Mutant(
        "follow-takes-cut-properties",
        "a message cut within its properties is taken for whole",
        "rocketmq/follow/tail.py",
        'return b"\\0" not in message.raw_properties',
        "return True",
        (f"{END}::test_a_message_cut_anywhere_waits_until_it_is_whole",),
    ),
    Mutant(
        "follow-judges-by-a-third-reading",
        "a message finished since it was read is put with the keys it had then",
        "rocketmq/follow/tail.py",
        "if _is_whole(folder, batch.begin + last, message):",
        'if _is_whole(folder, batch.begin + last, stored_bytes(folder, batch.begin + last, len(message)) or b""):',
        (f"{END}::test_a_message_finished_between_two_looks_has_all_its_keys[4]",),
    ),
    Mutant(
        "follow-no-look-behind",
        "a log that was rewritten is read on as if nothing had happened",
        "rocketmq/follow/dispatcher.py",
        "            losses = (self._rewritten(),)\n",
        "            pass\n",
        (f"{REWRITTEN}::test_messages_written_below_the_position_while_the_last_one_stays_are_noticed[False]",),
    ),
    Mutant(
        "follow-fingerprint-behind-the-put",
        "a batch that the flusher makes durable at once has no fingerprint after a crash",
        "rocketmq/follow/dispatcher.py",
        "            self.fingerprints.save()\n            entries",
        "            entries",
        (f"{REWRITTEN}::test_what_was_durable_when_the_follower_died_is_checked_when_it_comes_again",),
    ),
    Mutant(
        "follow-compares-the-last-message-only",
        "what is written over before a message that stays is not noticed",
        "rocketmq/follow/fingerprints.py",
        "if verdict is not Verdict.SAME or self.begin < 0:",
        "if True:",
        (f"{REWRITTEN}::test_messages_written_below_the_position_while_the_last_one_stays_are_noticed[True]",),
    ),
    Mutant(
        "follow-forgets-to-read-again",
        "a follower that dies while it reads a rewritten part again goes on behind it",
        "rocketmq/follow/dispatcher.py",
        "self.position = min(self.fingerprints.continue_at, durable)",
        "self.position = durable",
        (f"{REWRITTEN}::test_a_follower_killed_while_it_reads_again_misses_nothing",),
    ),
    Mutant(
        "follow-continues-behind-the-durable",
        "what was put but not durable when the log changed is lost with the follower",
        "rocketmq/follow/dispatcher.py",
        "self.position = min(self.fingerprints.continue_at, durable)",
        "self.position = self.fingerprints.continue_at",
        (f"{REWRITTEN}::test_a_life_with_every_kind_of_crash[4]",),
    ),
    Mutant(
        "follow-loses-reports",
        "what was passed over before an error in the same round is never reported",
        "rocketmq/follow/dispatcher.py",
        "if self.position != begin or done.losses:",
        "if False:",
        ("tests/integration/cli/test_follow.py::test_damage_and_missing_segments_are_code_4_and_can_be_passed_over",),
    ),
    Mutant(
        "follow-unmounted-is-rewritten",
        "a commit log that isn't mounted counts as wiped, and is read again from its beginning",
        "rocketmq/follow/dispatcher.py",
        "if not segments:\n            found =",
        "if not segments:\n            return 0\n            found =",
        (f"{UNMOUNTED}::test_a_commit_log_without_segments_is_unavailable_and_the_position_stays[False-empty]",),
    ),
    Mutant(
        "follow-closed-is-closed",
        "a broker that starts while a closed store is read counts as none",
        "rocketmq/follow/dispatcher.py",
        "stable = NOTHING  # a broker has started since",
        "pass  # a broker has started since",
        (f"{CLOSED}::test_a_broker_that_starts_while_the_log_is_read_may_be_writing",),
    ),
    Mutant(
        "follow-fingerprints-forget-the-past",
        "old fingerprints go first, and a rewritten log is read again from its beginning",
        "rocketmq/follow/fingerprints.py",
        "(newest.end - later.end) // _SPARSE",
        "10**18",
        (f"{FINGERPRINTS}::test_fingerprints_keep_what_is_not_durable_and_thin_out_what_is",),
    ),
    Mutant(
        "follow-lag-of-preallocated",
        "the log's end is the end of its last segment, written or not",
        "rocketmq/log/store.py",
        "low, high = (middle, high) if any(",
        "low, high = (middle, high) if True or any(",
        (f"{STORE}::test_a_large_segment_that_has_just_begun",),
    ),
    Mutant(
        "follow-checkpoint-too-late",
        "dispatch begins at a segment whose first message the checkpoint doesn't cover",
        "rocketmq/log/store.py",
        "if first.store_ms <= checkpoint.safe_index_ms:",
        "if first.store_ms <= checkpoint.safe_ms:",
        (f"{DISPATCHER}::test_from_the_checkpoint",),
    ),
    Mutant(
        "follow-fenced-and-idle",
        "a follower that another writer has replaced sits there as if it were one",
        "cli/follow.py",
        "self.index.put_batch({name: [] for name in",
        "dict({name: [] for name in",
        (f"{FOLLOWING}::test_a_writer_that_was_fenced_is_told_so_also_while_nothing_comes",),
    ),
    Mutant(
        "import-any-hash",
        "keys that no classic entry has are imported with those that one has",
        "rocketmq/classic.py",
        "pa.array(np.isin(have, want))",
        "pa.array(np.ones(len(have), bool))",
        (f"{IMPORT}::test_entries_of_nobody_and_hidden_messages_are_counted_apart",),
    ),
    Mutant(
        "import-position-past-the-message",
        "keys that a message has in the next index file are lost when the import dies between them",
        "rocketmq/classic.py",
        "        self._advance(last)\n",
        "        self._advance(last + 1)\n",
        (f"{IMPORT}::test_golden_index_files_give_what_the_log_has",),
    ),
    Mutant(
        "own-topics-indexed",
        "RocketMQ's own topics are indexed by default",
        "rocketmq/log/columns.py",
        "return not layout.is_system_topic(topic) or",
        "return True or",
        (f"{COLUMNS}::test_rocketmqs_own_topics_are_not_selected_by_default",),
    ),
    Mutant(
        "selection-forgotten-at-the-end-of-the-log",
        "the last messages of a live log are put whatever was selected",
        "rocketmq/follow/tail.py",
        ", selection=batch.selection)",
        ")",
        (f"{DISPATCHER}::test_only_what_is_selected_is_put",),
    ),
    Mutant(
        "lz4-blocks-without-a-bound",
        "an lz4 body's blocks are larger than its frame says",
        "rocketmq/log/message.py",
        "_LZ4_BLOCK_BYTES = 1 << 16",
        "_LZ4_BLOCK_BYTES = 1 << 22",
        (f"{MESSAGE}::test_blocks_of_lz4_are_independent[220000]",),
    ),
)
