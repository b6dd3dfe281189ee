"""The commands that keep an index small, and a copy of it."""

from __future__ import annotations

from typer import Option

from tiered_index.cli.declaring import done_by
from tiered_index.cli.options import EraseOptions, SparkOptions, WindowOptions, duration


@done_by("tiered_index.cli.keep.merge:merge")
def merge(
    windows: WindowOptions,
    shard_bytes: int | None = Option(
        None, help="Approximate bytes of an object (shard). Default: 1 GiB, with Spark 256 MiB."
    ),
    threads: int | None = Option(None, min=1, help="Number of parallel tasks in this process (default 2)."),
    *,
    on: SparkOptions,
) -> None:
    """Merge uploaded files into window tables, so that a lookup costs one request per window.

    [bold]Examples[/bold]

      tiered-index merge --storage s3://bucket/index --window 1d --dry-run

      tiered-index merge --storage s3://bucket/index --window 1d,30d

      tiered-index merge --storage s3://bucket/index --window 1h --begin 2023-11-14 --min-age 10m --json

      tiered-index merge --storage s3://bucket/index --window 30d --master spark://host:7077

    A writer merges by itself (setting `merge`), so you need this command only for larger windows, or without a writer.
    Tables of shorter windows are merged too. A window of 30d has 30 days, not a calendar month. Writers and readers may
    run. A log record removes the merged files from the index; the writer or `tiered-index orphans` deletes their
    objects later. Exit code 4: an object to merge is missing; --skip-lost merges the rest.

    With --master, --conf or --ship, and under spark-submit, Spark runs the tasks. --dry-run does not start it.
    """


@done_by("tiered_index.cli.keep.copy:copy")
def copy(
    source: str | None = Option(None, "--from", metavar="URI", help="Index to copy. Default: --storage."),
    to: str = Option(
        ..., "--to", metavar="URI", help="Storage of the copy: without an index, or with an earlier copy of this one."
    ),
    threads: int = Option(4, min=1, help="Objects copied at a time."),
    follow: bool = Option(False, "--follow", help="Keep the copy up to date until SIGTERM or SIGINT."),
    interval: int = Option(**duration("1m"), help="With --follow: time between updates."),
    must_exist: bool = Option(
        False, "--must-exist", help="Fail if --to has no copy yet, for example if its disk is not mounted."
    ),
    grace: int = Option(
        **duration("1d"), help="Time to keep the bytes of objects that the source removed in the copy, at least 1h."
    ),
) -> None:
    """Copy an index to another storage, for a backup, a move or a standby.

    [bold]Examples[/bold]

      tiered-index copy --from s3://bucket/index --to s3://other-bucket/index?region=eu-west-1

      tiered-index copy --from file:///srv/index --to s3://bucket/index --json

      tiered-index copy --from s3://bucket/index --to s3://standby/index --follow --interval 30s

    The copy is one consistent snapshot of the index. The command checks every byte of every object. Then
    one log record makes the whole copy visible. Run the command again to continue an interrupted copy or update an
    earlier one. Writers, merges and readers of the source may run. The copy is an index of its own. A writer can open
    it with a new root; after that, the copy can't be updated.

    If the source removes objects, the next copy removes them from the copy's log. A later copy deletes their bytes
    after --grace. With --follow the command copies again and again, as a timer would: the copy stays up to date as a
    standby. Exit code 3: a storage does not answer or refuses; with --follow the command tries
    again. Exit code 4: the source is damaged. But the command copies a source whose log lacks only its first records.
    --follow --json prints a line per round, also for errors.
    """


@done_by("tiered_index.cli.keep.expire:expire")
def expire(
    now: bool = Option(False, "--now", help="Also rewrite the objects that hold expired entries beside others."),
    yes: bool = Option(False, "--yes", help="Apply the changes."),
) -> None:
    """Expire entries by age, topic or size.

    [bold]Examples[/bold]

      tiered-index expire --storage s3://bucket/index --set retention.age_s=365d

      tiered-index expire --storage s3://bucket/index --set retention.age_s=365d --set 'retention.topics.debug-*=7d'
      --yes

      tiered-index expire --storage s3://bucket/index --config index.toml --now --yes --json

    Give the rule as the settings `retention.*`, for example by --set. The command prints the objects, entries, bytes
    and monthly cost that it would remove. Pass --yes to apply.

    With --yes the command appends a log record with the time before which entries expire, such as 365 days ago. You
    can't undo this. From then on lookups leave out older entries, and answers state this time as expired_before_ms. The
    record also removes the objects that have only expired entries. Objects that also have other entries stay until the
    next merge, which leaves expired entries out. A window table of the longest tier is merged again only if late
    entries arrive. --now does not wait for a merge: it rewrites these objects.

    Archived messages have an age of their own, counted from their upload: retention.segments_age_s for all,
    retention.segments_topics.TOPIC for one topic. The command counts the segments that expire, and those that stay
    although the entries of their age expire. It lists at most 1,000 of them.

    The command deletes the bytes of objects that were removed at least retention.grace_s ago. To delete the bytes of
    objects that it removes now, run it again after that time. Writers and readers may run. A writer with these settings
    expires entries by itself.
    """


@done_by("tiered_index.cli.keep.erase:erase")
def erase(
    erasure: EraseOptions,
    now: bool = Option(False, "--now", help="Also rewrite the objects that hold the entries, and delete the bytes."),
) -> None:
    """Erase the entries of a topic before a time: all, or those of some keys or of a queue.

    [bold]Examples[/bold]

      tiered-index erase --storage s3://bucket/index --topic orders --key order-4711

      tiered-index erase --storage s3://bucket/index --topic orders --key order-4711 --key order-4712 --now --yes --json

      tiered-index erase --storage s3://bucket/index --topic debug --queue 3 --before 2026-01-01 --yes

    The command prints the objects, entries and bytes that it would remove. Pass --yes to apply.

    With --yes one log record hides the entries permanently. It also hides such entries if they arrive later. The next
    merge of an object removes their bytes. A window table of the longest tier is merged again only if late entries
    arrive. --now does not wait for a merge. It rewrites the objects and archived segments that hold the entries. It
    also deletes objects that were removed at least --grace ago. The printed certificate lists the changes, the result
    of a scan of the stored bytes, and the places that the scan can't see.

    Status hidden (without --now): bytes may be left. Status erased: no byte is left. Status pending: removed objects or
    unfinished uploads may still have bytes; run the command again later. Status remains: objects of the
    index still hold some of the bytes, or can't be read (exit code 1).

    If nothing matches, or a key has no entry, the exit code is 1, and the command names the key. --yes records the
    erasure all the same. Repeating an erasure that is in force needs no match.

    With preset rocketmq, entries have no fingerprint. So the command also erases other keys of the topic with the same
    hash.
    """


@done_by("tiered_index.cli.keep.orphans:orphans")
def orphans(
    older_than: int = Option(
        **duration("1d"), help="List objects older than this, at least 1h. Less than a day may be unsafe."
    ),
    yes: bool = Option(False, "--yes", help="Delete them."),
) -> None:
    """Find objects that the log does not name.

    [bold]Examples[/bold]

      tiered-index orphans --storage s3://bucket/index

      tiered-index orphans --storage s3://bucket/index --older-than 7d --yes --json

    Crashes and merges leave such orphans. A running writer deletes them once a day, so you need this command only for
    an index without one. The command prints them. Pass --yes to delete them. It leaves out objects younger than
    --older-than: their upload may still run. It also leaves out objects that the log removed in that time: readers may
    still use them.

    The default of a day is always safe: jobs and writers publish nothing that they started to upload more than 23 hours
    ago. A shorter time is safe only if every merge, build and upload ends within it. Otherwise a job fails, or the
    index loses objects.

    The command also lists foreign objects in the index's folders (such as log/note.txt), whatever their age. The index
    ignores them, and --yes does not delete them. --yes also drops half-made uploads that are older than --older-than.
    """
