"""Defects of copies: a target that names what is not there, or that differs, and a follower that takes too much away."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

COMPLETENESS = "tests/unit/service/copies/test_completeness.py"
ROUNDS = "tests/unit/service/copies/test_rounds.py"
COPYING = "service/lifecycle/copying.py"

MUTANTS = (
    Mutant(
        "copy-publishes-before-the-last-object",
        "the record names an object that is not there yet",
        COPYING,
        "            for future in [pool.submit(self._bring, one) for one in parts]:\n",
        "            if not self.copied.state.number:\n"
        "                self._publish(self.log.state)\n"
        "            for future in [pool.submit(self._bring, one) for one in parts]:\n",
        (f"{COMPLETENESS}::test_a_crash_at_any_step_leaves_no_target_or_a_complete_one",),
    ),
    Mutant(
        "copy-believes-a-size",
        "what an earlier try left is taken for whole by its size",
        COPYING,
        "            _check(self.target, one, lambda start, window: None)\n",
        "            pass\n",
        (f"{COMPLETENESS}::test_what_is_there_is_not_sent_again_unless_it_differs",),
    ),
    Mutant(
        "copy-keeps-what-a-sweep-may-take",
        "the record names what a sweep of the target deletes",
        COPYING,
        "(age_s < MAX_AGE_S or not self.copied.state.number)",
        "age_s >= 0",
        (f"{ROUNDS}::test_what_lay_in_a_target_for_so_long_that_a_sweep_may_take_it_is_sent_again",),
    ),
    Mutant(
        "copy-of-damage",
        "a damaged object is copied",
        COPYING,
        '        if found:\n            raise CorruptFile(one.name, f"{found[0].part}',
        '        if False:\n            raise CorruptFile(one.name, f"{found[0].part}',
        (f"{COMPLETENESS}::test_nothing_damaged_is_copied_and_the_name_is_told",),
    ),
    Mutant(
        "copy-of-what-was-not-checked",
        "other bytes are sent than were checked: a window was read twice, and differed",
        COPYING,
        '        CorruptFile.unless_equal(one.name, "two reads of the same bytes differ", sums[start], crc32)\n',
        "        assert crc32 is not None\n",
        (f"{COMPLETENESS}::test_what_is_sent_is_what_was_checked",),
    ),
    Mutant(
        "copy-over-a-writer",
        "a follower goes on with a target that a writer has taken over",
        COPYING,
        "        if self.copied.record(there.number).kind != _KIND:\n",
        "        if there.epoch > 99:\n",
        (f"{ROUNDS}::test_a_target_that_was_written_to_is_let_alone",),
    ),
    Mutant(
        "copy-removes-what-is-named",
        "a follower removes from the copy what the source still names",
        COPYING,
        "remove=tuple(name for name in _parts(before) if name not in _parts(after)),\n        **taken",
        "remove=tuple(name for name in _parts(before) if name not in after.archive),\n        **taken",
        (f"{ROUNDS}::test_following_a_life",),
    ),
    Mutant(
        "copy-deletes-at-once",
        "a follower deletes what it removed though readers may still read it",
        COPYING,
        "Retention(grace_s=round(grace_s)), delete=True)",
        "Retention(grace_s=3600), delete=True)",
        (f"{ROUNDS}::test_bytes_stay_in_the_copy_for_the_grace",),
    ),
    Mutant(
        "copy-with-the-sources-id",
        "a root of the source opens the copy, and misses what was published since",
        COPYING,
        "own = replace(state.genesis, index_id=secrets.token_hex(8))",
        "own = state.genesis",
        (f"{ROUNDS}::test_the_sources_root_does_not_write_to_the_copy_and_a_new_one_goes_on",),
    ),
    Mutant(
        "copy-forgets-what-the-log-says",
        "losses, horizons and stream batches are not taken over",
        COPYING,
        "if member.name not in _OWN and member.name in members:",
        'if member.name == "positions":',
        (f"{COMPLETENESS}::test_every_member_of_the_state_is_copied",),
    ),
    Mutant(
        "copy-takes-the-storages-clock-for-its-own",
        "what was sent a moment ago to a storage whose clock is days off is never published",
        COPYING,
        "self._began_ms.get(one.name, info.modified_ms)",
        "info.modified_ms",
        (f"{ROUNDS}::test_a_storage_of_another_day_gets_its_copy[3]",),
    ),
)
