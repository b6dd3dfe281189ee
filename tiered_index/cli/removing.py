"""What deletes, a dry run unless --yes: `tiered-index expire`, what the retention rule says has expired; `erase`,
entries of a topic, of keys or of a queue before they expire, and what `spark erase` shares with it; `orphans`, objects
that the log does not name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from typer import Option

from tiered_index.cli.options import EraseOptions, Yes, bytes_option, duration_option, pairs, parse_duration
from tiered_index.cli.output import Output, counted, describe_object, human_bytes, likely_seconds, unknown_topic
from tiered_index.cli.session import Session, StoredIndex, command, open_stored_index
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.retention import Expired, Retention
from tiered_index.rocketmq.archive.erasure import MessagesToErase
from tiered_index.service.cold.disk_cache import CacheFolder, DiskCache
from tiered_index.service.cold.path import ColdSettings
from tiered_index.service.erasure.erase import EraseRequest, Erasure
from tiered_index.service.erasure.erase import erase as erase_index
from tiered_index.service.lifecycle.expiry import ExpiryPlan
from tiered_index.service.lifecycle.expiry import expire as expire_index
from tiered_index.service.lifecycle.orphans import Orphans, delete_orphans, find_orphans
from tiered_index.service.root import CACHE
from tiered_index.storage.base import ObjectInfo
from tiered_index.storage.metering import PriceTable
from tiered_index.types import format_time


def _age(text: str, name: str) -> Any:
    return Option(None, name, parser=duration_option, metavar="7d", help=text, show_default=False)


_REMAINS = 1


@command
def expire(
    session: Session,
    age: int | None = _age("Entries older than this expire.", "--age"),
    topic: list[str] | None = Option(
        None, metavar="PATTERN=AGE", help="An age of its own for topics, as 'debug-*=7d'; several times."
    ),
    max_bytes: int | None = Option(
        None, parser=bytes_option, metavar="100GiB", help="The oldest files and tables go beyond.", show_default=False
    ),
    segments_age: int | None = _age("Archived segments older than this expire.", "--segments-age"),
    grace: int | None = _age("How long the bytes of what was removed stay, 1h at least; by default 1d.", "--grace"),
    yes: Yes = False,
) -> int:
    """Let expire what is older than the rule says: the options' where one is given, else the setting retention.

    Shown are objects, entries, bytes and dollars a month; nothing is changed without --yes. With it one log record
    states what has expired, for good, and removes the objects that hold nothing else: no lookup shows any of it from
    then on, and answers tell expired_before_ms. What expiry and merges removed --grace ago is deleted (as
    `tiered-index orphans` does). The next merge leaves expired entries out. Writers and readers may be at work; a
    writer with the setting does the same by itself.

    [bold]Examples[/bold]

      tiered-index expire --storage s3://bucket/index --age 365d

      tiered-index expire --storage s3://bucket/index --age 365d --topic 'debug-*=7d' --topic 'audit=3650d' --yes

      tiered-index expire --storage s3://bucket/index --config index.toml --yes --json
    """
    config = session.config()
    rule = _rule(config.retention, age, pairs("--topic", topic), max_bytes, segments_age, grace)
    with open_stored_index(config) as index:
        planned, gone = expire_index(
            index.storage, index.log, rule, index.clock, yes=yes, settings=ColdSettings.of(config)
        )
        _tell(session.out, index, planned, gone, config.prices, done=yes)
    return 0


def _rule(
    setting: Retention,
    age: int | None,
    topics: Mapping[str, str],
    max_bytes: int | None,
    segments_age: int | None,
    grace: int | None,
) -> Retention:
    """Return the options' rule, or where none is given the setting's. Raises `InvalidArgument`, `ConfigError`."""
    if age is None and not topics and max_bytes is None and segments_age is None:
        given = setting
    else:
        try:
            ages = {pattern: parse_duration(text) for pattern, text in topics.items()}
        except ValueError as error:
            raise InvalidArgument(f"--topic: {error}") from error
        given = Retention(age_s=age, topics=ages, max_bytes=max_bytes, segments_age_s=segments_age)
    if not given.any:
        raise ConfigError("nothing says what expires: give --age, --topic, --max-bytes or --segments-age, or retention")
    return given if grace is None else replace(given, grace_s=grace)


def _tell(out: Output, index: StoredIndex, plan: ExpiryPlan, gone: Orphans, prices: PriceTable, *, done: bool) -> None:
    total = index.storage.total
    document = {
        "status": "expired" if done else "planned",
        "log_number": index.log.state.number,
        "expired": plan.expired.to_json(),
        "objects": [describe_object(stored) for stored in plan.objects],
        "segments": [{"object": s.name, "store": s.store, "bytes": s.object_bytes} for s in plan.segments],
        "entries": plan.entries,
        "bytes": plan.size_bytes,
        "usd_a_month": prices.month_usd(plan.size_bytes),
        "mixed_objects": len(plan.mixed),
        "mixed_entries": plan.mixed_entries,
        "unknown_topics": list(plan.unknown_topics),
        "deleted" if done else "to_delete": {"objects": len(gone.objects), "bytes": gone.size_bytes},
        "requests": total.requests_by_kind,
        "cost_usd": total.cost_usd,
    }
    out.answer(document)
    out.objects(plan.objects, *(f"{one.name}  {human_bytes(one.object_bytes)}" for one in plan.segments))
    for line in _horizons(plan.expired):
        out.line(line)
    would = "" if done else "would be "
    out.line(
        f"{counted(len(plan.objects), 'object')}, {counted(len(plan.segments), 'archived segment')} with "
        f"{counted(plan.entries, 'entry', 'entries')} {would}removed: {human_bytes(plan.size_bytes)}, "
        f"${prices.month_usd(plan.size_bytes):.4f} a month"
    )
    if plan.mixed:
        known = f", {counted(plan.mixed_entries, 'entry', 'entries')} at least" if plan.mixed_entries else ""
        out.line(
            f"{counted(len(plan.mixed), 'object')} may hold expired entries beside others{known}: a merge drops them"
        )
    out.line(
        f"{counted(len(gone.objects), 'object')} removed long enough ago {would}deleted: {human_bytes(gone.size_bytes)}"
    )
    for horizon in plan.expired.horizons:
        for ms in (horizon.before_ms, *(ms for _, ms in horizon.topics)):
            if ms and (asked := likely_seconds("what expires", ms)) is not None:
                out.remark(asked)
    for pattern in plan.unknown_topics:
        out.remark(unknown_topic(pattern, plan.known_topics))
    if not done:
        out.remark("nothing was changed: --yes does that")


def _horizons(expired: Expired) -> Sequence[str]:
    lines = []
    for horizon in expired.horizons:
        lines += [f"topics {pattern}: expired before {format_time(ms)}" for pattern, ms in horizon.topics if ms]
        if horizon.before_ms:
            rest = "other topics" if horizon.topics else "all topics"
            lines.append(f"{rest}: expired before {format_time(horizon.before_ms)}")
    return lines


def erase_request(given: EraseOptions) -> EraseRequest:
    """Return what the options ask for. Raises `InvalidArgument`."""
    if given.queue is not None and given.before is None:
        raise InvalidArgument("--queue needs --before: the moment up to which the queue is erased")
    return EraseRequest(given.topic, tuple(given.key or ()), given.queue, given.before)


@command
def erase(
    session: Session,
    given: EraseOptions,
    now: bool = Option(False, "--now", help="Rewrite what holds any of it at once, and delete the bytes."),
) -> int:
    """Erase what a topic has before a moment: of keys, of a queue, or all of it.

    Shown are the objects that hold any of it, entries and bytes; nothing is changed without --yes. With it one log
    record states what is erased, for good: no lookup shows it from then on, wherever it lies and whenever it comes
    there, a writer's buffer and files among it. Its bytes go with the next merges, or at once with --now, which merges
    what holds any, and deletes what records removed --grace ago. The certificate says what was done, what a scan of the
    stored bytes found afterwards, and what it could not see.

    Status erased: no byte is left. pending: bytes wait for the grace, for an upload that somebody else has begun, or
    for a staged file; run it again later. remains: objects that the log names still hold some of it, or can't be read;
    only this one is a failure (exit code 1).

    A key is known by its hash and its fingerprint, in an index of preset rocketmq by its hash alone: there another key
    of the topic with the same hash goes, too.

    [bold]Examples[/bold]

      tiered-index erase --storage s3://bucket/index --topic orders --key order-4711

      tiered-index erase --storage s3://bucket/index --topic orders --key order-4711 --key order-4712 --now --yes --json

      tiered-index erase --storage s3://bucket/index --topic debug --queue 3 --before 2026-01-01 --yes
    """
    return erase_here(session, given, now=now)


def erase_here(session: Session, given: EraseOptions, *, now: bool) -> int:
    """Erase in this process; return the exit code. Raises as `erase_request`."""
    request, config = erase_request(given), session.config()
    with open_stored_index(config) as index, session.progress("erasing", None) as bar:
        done = erase_index(
            index.storage,
            index.log,
            request,
            index.clock,
            yes=given.yes,
            now=now,
            grace_s=given.grace,
            threads=config.query_threads,
            messages=partial(MessagesToErase, request),
            progress=lambda what, done, total: bar.update(done, f"{done:,} of {total:,} {what}", total),
        )
        if given.yes:
            _drop_cached(config, index)
        total = index.storage.total
        session.out.answer({**done.to_dict(), "requests": total.requests_by_kind, "cost_usd": total.cost_usd})
    return tell_erased(session.out, done)


def _drop_cached(config: IndexConfig, index: StoredIndex) -> None:
    """Delete what the given root, or the cache, still has of objects that are gone: its writer may have ended."""
    folder = config.cache_dir or (config.root / CACHE if config.root is not None else None)
    state = index.log.state
    if folder is not None and state.genesis is not None:
        CacheFolder(DiskCache(folder, config.cache_max_bytes), state.genesis.index_id).forget_unnamed(state.objects)


def tell_erased(out: Output, done: Erasure) -> int:
    """Tell people what became of it; return the exit code."""
    out.objects(done.objects)
    what = f"{counted(done.entries, 'entry', 'entries')} in {counted(len(done.objects), 'object')}"
    until = format_time(max(stone.before_ms for stone in done.tombstones))
    if done.status == "planned":
        size = human_bytes(done.size_bytes)
        out.line(f"{what} ({size}) would be erased, and whatever comes with a time before {until}")
    else:
        out.line(f"{what} are hidden for good, and whatever comes with a time before {until}")
        out.line(
            f"{counted(done.entries_removed, 'entry', 'entries')} taken out of the storage, "
            f"{counted(len(done.removed), 'object')} removed, {counted(done.deleted, 'object')} deleted: "
            f"{human_bytes(done.deleted_bytes)}"
        )
        if done.segments_read:
            out.line(
                f"{counted(done.messages_erased, 'message')} overwritten in "
                f"{counted(done.segments_rewritten, 'archived segment')} of {done.segments_read:,}"
            )
        out.line(
            f"scan: {counted(done.scanned_objects, 'object')}, {counted(done.scanned_entries, 'entry', 'entries')} and "
            f"{human_bytes(done.scanned_bytes)} read: {counted(len(done.remaining), 'object')} with something left"
        )
        out.line(f"log records: {', '.join(map(str, done.log_numbers)) or 'none'}; status: {done.status}")
    if done.by_hash_alone:
        out.line("without fingerprints: keys of an equal hash are among them")
    if done.collisions:
        out.line(
            f"collisions: {counted(done.collisions, 'entry', 'entries')} of archived messages went that have another "
            f"key; the messages themselves stay"
        )
    for said in done.unchecked:
        out.line(f"not checked: {said}")
    for topic in done.unknown_topics:
        out.remark(unknown_topic(topic, done.known_topics))
    for step in done.to_do:
        out.remark(step)
    if (asked := likely_seconds("what is erased", max(stone.before_ms for stone in done.tombstones))) is not None:
        out.remark(asked)
    if done.status == "planned":
        out.remark("nothing was changed: --yes does that")
    return _REMAINS if done.status == "remains" else 0


@command
def orphans(
    session: Session,
    older_than: int = Option(
        86400,
        parser=duration_option,
        metavar="1d",
        help="Only what is older; below a day, see above.",
        show_default="1d",
    ),
    yes: bool = Option(False, "--yes", help="Delete them; without it they are only listed."),
) -> int:
    """Find objects that the log does not name: what crashes left, and what merges have replaced.

    Unfinished uploads, too.

    Nothing younger than --older-than is touched, nor what a merge removed since: an upload may be under way, and a
    reader may still stand at the log position before the merge.

    Neither jobs nor writers publish what they began to upload 23 hours ago, so a day is safe beside any. Take less only
    where no merge, build, write or compaction runs, and no writer waits for the storage, for that long: it would fail,
    or lose what it publishes.

    Objects in the index's folders (log/, data/ ...) that no index makes, such as log/note.txt, are listed as foreign,
    whatever their age. The index ignores them, and --yes leaves them to whoever put them there. What no object's name
    can be (a blank, a % sign) is not seen at all.

    [bold]Examples[/bold]

      tiered-index orphans --storage s3://bucket/index

      tiered-index orphans --storage s3://bucket/index --older-than 7d --yes --json
    """
    with open_stored_index(session.config()) as index:
        found = find_orphans(index.storage, index.log, older_than_s=older_than)
        if yes:
            found = delete_orphans(index.storage, found)
        requests, cost_usd = index.storage.total.requests_by_kind, index.storage.total.cost_usd
    document: dict[str, Any] = {
        "status": "deleted" if yes else "found",
        "objects": [_described(info) for info in found.objects],
        "uploads": [handle.name for handle in found.uploads],
        "foreign": [_described(info) for info in found.foreign],
        "bytes": found.size_bytes,
        "requests": requests,
        "cost_usd": cost_usd,
    }
    session.out.answer(document)
    for info in found.objects:
        session.out.line(_bytes_line(info))
    for info in found.foreign:
        session.out.line(f"{_bytes_line(info)}  foreign")
    for handle in found.uploads:
        session.out.line(f"{handle.name}  unfinished upload")
    what = (
        f"{counted(len(found.objects), 'object')} ({human_bytes(found.size_bytes)}), "
        f"{counted(len(found.uploads), 'unfinished upload')}"
    )
    session.out.line(f"{what} {'deleted' if yes else 'found'}")
    if found.foreign:
        session.out.line(f"{counted(len(found.foreign), 'foreign object')} left alone")
    if not yes and (found.objects or found.uploads):
        session.out.remark("nothing was deleted: --yes does that")
    return 0


def _described(info: ObjectInfo) -> dict[str, Any]:
    return {"object": info.name, "bytes": info.size_bytes, "modified_ms": info.modified_ms}


def _bytes_line(info: ObjectInfo) -> str:
    return f"{info.name}  {human_bytes(info.size_bytes)}  {format_time(info.modified_ms)}"
