"""Defects of expiry: what has expired is shown, what has not is deleted, or deleted too early."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

EXPIRY = "tests/unit/service/test_expiry.py"
RULE = "tests/unit/service/test_retention.py"

MUTANTS = (
    Mutant(
        "expiry-deletes-before-the-record",
        "objects are deleted, and the log still names them",
        "service/lifecycle/expiry.py",
        '        return LogRecord(0, "expire", epoch or 0, "", 0, remove=names, expired=plan.expired)\n',
        "        log._storage.delete_many(names)\n"
        '        return LogRecord(0, "expire", epoch or 0, "", 0, remove=names, expired=plan.expired)\n',
        (f"{EXPIRY}::test_a_storage_that_fails_at_any_call_leaves_the_old_answer_or_the_new_one",),
    ),
    Mutant(
        "expiry-of-writers-by-age-alone",
        "a writer keeps files that have expired by their topic, and others go in their place",
        "service/lifecycle/lifecycle.py",
        "session.epoch, stats)",
        "session.epoch)",
        (f"{EXPIRY}::test_the_writer_the_command_and_a_job_remove_the_same",),
    ),
    Mutant(
        "expiry-asks-every-minute",
        "a writer reads what old files hold of topics again and again",
        "service/lifecycle/expiry.py",
        "if stored.name not in self._known]",
        "if stored.name]",
        (f"{EXPIRY}::test_a_writer_asks_once_what_objects_hold_of_topics",),
    ),
    Mutant(
        "expiry-planned-before-a-merge",
        "a record removes what a merge has removed since the plan was made",
        "service/lifecycle/expiry.py",
        "        plan = plan_expiry(rule, state, now_ms, stats)\n        plans.append(plan)\n",
        "        plan = plans[0] if plans else plan_expiry(rule, state, now_ms, stats)\n        plans.append(plan)\n",
        (
            "tests/faults/test_jobs_side_by_side.py::test_one_runs_while_another_is_stopped_before_a_write"
            "[expiring-merging]",
        ),
    ),
    Mutant(
        "expiry-forgets-the-grace",
        "bytes are deleted though readers may still read them",
        "service/lifecycle/expiry.py",
        "removed_s=rule.grace_s)",
        "removed_s=3600.0)",
        (f"{EXPIRY}::test_bytes_stay_for_the_grace",),
    ),
    Mutant(
        "expiry-sweeps-what-a-job-publishes",
        "with a short grace the sweep deletes what a long merge has yet to publish",
        "service/lifecycle/expiry.py",
        "older_than_s=max(rule.grace_s, _UNNAMED_S)",
        "older_than_s=rule.grace_s",
        (f"{EXPIRY}::test_what_a_job_has_yet_to_publish_stays_for_a_day_however_short_the_grace",),
    ),
    Mutant(
        "orphans-without-their-grace",
        "what a record has just removed is deleted, and a reader at work fails",
        "service/lifecycle/orphans.py",
        "for number in removed.keys() - young",
        "for number in removed.keys() | young",
        (f"{EXPIRY}::test_bytes_stay_for_the_grace",),
    ),
    Mutant(
        "expiry-shown-by-one-lookup",
        "a lookup shows what has expired and is still there, in window tables, too",
        "service/lookup/query.py",
        "since = lookup.since(begins.get(handle.source, lookup.second_min)) if begins else lookup",
        "since = lookup",
        (f"{EXPIRY}::test_window_tables_hide_what_has_expired",),
    ),
    Mutant(
        "expiry-shown-by-a-batch",
        "a batch of lookups shows what has expired",
        "service/lookup/query.py",
        "kept.get((handle.source, handle.hash)) or batch.under(handle.hash)",
        "batch.under(handle.hash)",
        (f"{EXPIRY}::test_window_tables_hide_what_has_expired",),
    ),
    Mutant(
        "expiry-of-one-index-in-all",
        "what has expired of one index is hidden in others, too",
        "service/lookup/query.py",
        "lookup.since(begins.get(handle.source, lookup.second_min))",
        "lookup.since(max(begins.values(), default=lookup.second_min))",
        (f"{EXPIRY}::test_several_indexes_each_with_its_own_horizon",),
    ),
    Mutant(
        "expiry-of-the-neighbour-topic",
        "a merge leaves out entries of topics that are kept longer",
        "retention.py",
        "_begin_s(self.before_ms(name))",
        "_begin_s(self.latest_ms)",
        (f"{EXPIRY}::test_a_merge_leaves_out_what_has_expired_and_nothing_else",),
    ),
    Mutant(
        "expiry-of-what-is-older-than-the-epoch",
        "a merge leaves out entries before 1970 of topics that never expire",
        "retention.py",
        "return before_ms // 1000 if before_ms else ALWAYS",
        "return before_ms // 1000",
        (f"{RULE}::test_entries_older_than_the_epoch",),
    ),
    Mutant(
        "expiry-of-half-a-table",
        "a window table of which one shard has expired goes whole",
        "service/lifecycle/expiry.py",
        "    return all(map(is_whole, group))\n",
        "    return any(map(is_whole, group))\n",
        (f"{RULE}::test_a_table_goes_with_its_last_shard",),
    ),
    Mutant(
        "expiry-a-second-too-early",
        "an object goes a second before its last entry expires",
        "retention.py",
        "return second * 1000 < self.of_all_ms",
        "return second * 1000 <= self.of_all_ms",
        (f"{RULE}::test_an_object_of_the_last_second_stays",),
    ),
    Mutant(
        "expiry-of-unnamed-topics",
        "an object goes whose topics nobody knows",
        "service/lifecycle/expiry.py",
        "        return bool(known) and all(\n",
        "        return known is not None and all(\n",
        (f"{RULE}::test_a_topic_of_a_longer_age_keeps_an_object",),
    ),
    Mutant(
        "expiry-shortest-age-counts",
        "of several patterns the one that keeps shortest counts",
        "retention.py",
        "        return min(\n            [ms for pattern, ms in self.topics",
        "        return max(\n            [ms for pattern, ms in self.topics",
        (f"{RULE}::test_ages_of_topics_and_patterns",),
    ),
    Mutant(
        "expiry-goes-back",
        "a longer rule shows again what has expired",
        "retention.py",
        "            if horizon.latest and not any(known.has(horizon) for known in horizons):\n"
        "                horizons = (*(known for known in horizons if not horizon.has(known)), horizon)\n",
        "            horizons = (horizon,)\n",
        (f"{RULE}::test_what_has_expired_stays_so_whatever_a_later_rule_says",),
    ),
    Mutant(
        "expiry-lost-in-checkpoints",
        "who opens by a checkpoint shows what has expired",
        "service/log/state.py",
        "        self._lost, self._expired = begun.lost, begun.expired\n",
        "        self._lost, self._expired = begun.lost, NOTHING\n",
        (f"{EXPIRY}::test_what_is_stated_outlives_checkpoints",),
    ),
    Mutant(
        "expiry-readable-by-all",
        "versions that don't know expiry show what has expired",
        "retention.py",
        "        return 2 if self else 1\n",
        "        return 1\n",
        (f"{EXPIRY}::test_the_record_and_its_checkpoint_are_refused_by_who_does_not_know_them",),
    ),
    Mutant(
        "expiry-by-a-fenced-writer",
        "a writer that was replaced expires by its own rule",
        "service/lifecycle/expiry.py",
        '    log.append("what has expired", epoch, make)\n',
        '    log.append("what has expired", None, make)\n',
        (f"{EXPIRY}::test_a_fenced_writer_expires_nothing",),
    ),
    Mutant(
        "expired-segments-archived-again",
        "a segment that has expired is uploaded again and again",
        "service/lifecycle/segment_archive.py",
        "            if start + size_bytes <= state.expired.segments.get(store, 0):\n",
        "            if start + size_bytes < state.expired.segments.get(store, 0):\n",
        (f"{EXPIRY}::test_segments_that_have_expired_are_not_archived_again",),
    ),
    Mutant(
        "expired-beside-half-a-file",
        "an expired file goes while half of its unsealed form waits to be deleted, and a start finds damage",
        "service/lifecycle/lifecycle.py",
        "        return not any(path.name in waiting or path.exists() for path in paths)\n",
        "        return bool(paths)\n",
        (f"{EXPIRY}::test_an_expired_file_of_which_something_is_left_is_uploaded_first",),
    ),
    Mutant(
        "merge-of-nothing-is-never-published",
        "sources of which everything has expired stay for ever",
        "service/merge/run.py",
        "added <= state.objects.keys() and (added or len(gone) == len(names)):",
        "added <= state.objects.keys():",
        (f"{EXPIRY}::test_a_merge_of_nothing_but_expired_entries_leaves_no_table",),
    ),
)
