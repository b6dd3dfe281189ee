"""Defects of migrations: entries lost on the way, what is rewritten for nothing, and what a reader can't read."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

FAULTS = "tests/faults/test_migrate_faults.py"
VERSIONS = "tests/golden/test_versions.py"
MIGRATE = "service/merge/migrate.py"

MUTANTS = (
    Mutant(
        "migrate-counts-what-it-wrote",
        "an entry that is lost between reading and writing is published as gone",
        MIGRATE,
        "TaskResult(task.number, reader.read_counts, read_checksum, (finished,))",
        "TaskResult(task.number, {stored.name: stored.count}, checksum, (replace(finished, stored=replace(made, "
        "count=stored.count)),))",
        (f"{FAULTS}::test_nothing_is_published_that_has_other_entries",),
    ),
    Mutant(
        "migrate-rocketmqs-files",
        "files that RocketMQ reads are planned to be packed",
        MIGRATE,
        "(packed and not (stays_plain and stored.shard is None))",
        "packed",
        (f"{FAULTS}::test_there_and_back[rocketmq]",),
    ),
    Mutant(
        "migrate-forgets-the-layout-of-tables",
        "tables stay packed, and the version before can't read them",
        "service/merge/plan.py",
        "replace(task, packed=packed) for task in job.tasks), kind=",
        "task for task in job.tasks), kind=",
        (f"{FAULTS}::test_there_and_back[native]",),
    ),
    Mutant(
        "migrate-moves-times",
        "entries of a file get times relative to another beginning",
        MIGRATE,
        'part["time_diff_s"] = piece.seconds[: len(part)] - metadata.begin_ms // 1000',
        'part["time_diff_s"] = piece.seconds[: len(part)] - stored.second_min',
        (f"{FAULTS}::test_there_and_back[native]",),
    ),
    Mutant(
        "migrate-a-part-of-a-table",
        "a migration of a table leaves shards of it behind",
        "service/merge/plan.py",
        "    job = _job(shards, counts, window.window_s, descriptor, shard_bytes, expired=expired)\n",
        "    job = _job(shards[:1], counts, window.window_s, descriptor, shard_bytes, expired=expired)\n",
        (f"{FAULTS}::test_a_table_of_several_shards_goes_whole",),
    ),
)
