"""`tiered-index erase`: entries of a topic, of keys or of a queue go before they expire, a dry run unless --yes; and
what `spark erase` shares with it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from typer import Option

from tiered_index.cli.options import duration_option, time_option
from tiered_index.cli.output import Output, counted, human_bytes
from tiered_index.cli.session import Session, command, open_stored_index
from tiered_index.errors import InvalidArgument
from tiered_index.rocketmq.archive.erasure import MessagesToErase
from tiered_index.service.erasure.erase import EraseRequest, Erasure
from tiered_index.service.erasure.erase import erase as erase_index
from tiered_index.types import format_time

_REMAINS = 1
_SHOWN = 20

Topic = Annotated[str, Option("--topic", metavar="T", help="The topic, by its exact name.")]
Keys = Annotated[list[str] | None, Option("--key", metavar="K", help="Only of this key; several times.")]
Queue = Annotated[int | None, Option("--queue", metavar="Q", help="Only of this queue.", show_default=False)]
Before = Annotated[
    int | None,
    Option("--before", parser=time_option, metavar="T", help="Only what is older; by default all there is up to now."),
]
Grace = Annotated[
    int,
    Option(
        parser=duration_option,
        metavar="1h",
        help="With --now, how long the bytes of what records have removed stay, for exports and jobs at work.",
        show_default="1h",
    ),
]
Yes = Annotated[bool, Option("--yes", help="Do it.")]


def erase_request(topic: str, key: list[str] | None, queue: int | None, before: int | None) -> EraseRequest:
    """Return what the options ask for. Raises `InvalidArgument`."""
    if queue is not None and before is None:
        raise InvalidArgument("--queue needs --before: the moment up to which the queue is erased")
    return EraseRequest(topic, tuple(key or ()), queue, before)


@command
def erase(
    session: Session,
    topic: Topic,
    key: Keys = None,
    queue: Queue = None,
    before: Before = None,
    now: bool = Option(False, "--now", help="Rewrite what holds any of it at once, and delete the bytes."),
    grace: Grace = 3600,
    yes: Yes = False,
) -> int:
    """Erase what a topic has before a moment: of keys, of a queue, or all of it.

    Shown are the objects that hold any of it, entries and bytes; nothing is changed without --yes. With it one log
    record states what is erased, for good: no lookup shows it from then on, wherever it lies and whenever it comes
    there, a writer's buffer and files among it. Its bytes go with the next merges, or at once with --now, which merges
    what holds any, and deletes what records removed --grace ago. The certificate says what was done, what a scan of the
    stored bytes found afterwards, and what it could not see. Exit code 1: with --now, bytes are left; run it again.

    A key is known by its hash and its fingerprint, in an index of preset rocketmq by its hash alone: there another key
    of the topic with the same hash goes, too.

    [bold]Examples[/bold]

      tiered-index erase --storage s3://bucket/index --topic orders --key order-4711

      tiered-index erase --storage s3://bucket/index --topic orders --key order-4711 --key order-4712 --now --yes --json

      tiered-index erase --storage s3://bucket/index --topic debug --queue 3 --before 2026-01-01 --yes
    """
    return erase_here(session, erase_request(topic, key, queue, before), yes=yes, now=now, grace_s=grace)


def erase_here(session: Session, request: EraseRequest, *, yes: bool, now: bool, grace_s: int) -> int:
    """Erase in this process; return the exit code."""
    config = session.config()
    with open_stored_index(config) as index, session.progress("erasing", None) as bar:
        done = erase_index(
            index.storage,
            index.log,
            request,
            index.clock,
            yes=yes,
            now=now,
            grace_s=grace_s,
            threads=config.query_threads,
            messages=partial(MessagesToErase, request),
            progress=lambda what, done, total: bar.update(done, f"{done:,} of {total:,} {what}", total),
        )
        total = index.storage.total
        session.out.answer({**done.to_dict(), "requests": total.requests_by_kind, "cost_usd": total.cost_usd})
    return tell_erased(session.out, done)


def tell_erased(out: Output, done: Erasure) -> int:
    """Tell people what became of it; return the exit code."""
    lines = [
        f"{stored.name}  {counted(stored.count, 'entry', 'entries')}  {human_bytes(stored.size_bytes)}  "
        f"{format_time(stored.second_min * 1000)} to {format_time(stored.second_max * 1000)}"
        for stored in done.objects
    ]
    out.first(_SHOWN, lines, lambda rest: f"and {counted(rest, 'further object')}")
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
        out.remark(f"no stored file has topic {topic!r}: is it spelled so? Topics are by their exact name")
    for step in done.to_do:
        out.remark(step)
    if done.status == "planned":
        out.remark("nothing was changed: --yes does that")
    return _REMAINS if done.status == "remains" else 0
