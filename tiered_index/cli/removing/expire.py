"""`tiered-index expire`: removes entries that are older than the retention rule; without --yes it prints the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from typer import Option

from tiered_index.cli.options import Yes, bytes_option, duration_option, pairs, parse_duration
from tiered_index.cli.output import Output, counted, describe_object, human_bytes, likely_seconds, unknown_topic
from tiered_index.cli.session import Session, StoredIndex, command, open_stored_index
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.retention import Expired, Retention
from tiered_index.service.cold.path import ColdSettings
from tiered_index.service.lifecycle.expiry import ExpiryPlan
from tiered_index.service.lifecycle.expiry import expire as expire_index
from tiered_index.service.lifecycle.orphans import Orphans
from tiered_index.storage.prices import PriceTable
from tiered_index.types import format_time


def _age(text: str, name: str) -> Any:
    return Option(None, name, parser=duration_option, metavar="7d", help=text, show_default=False)


@command
def expire(
    session: Session,
    age: int | None = _age("Entries older than this expire.", "--age"),
    topic: list[str] | None = Option(
        None, metavar="PATTERN=AGE", help="Age for matching topics, for example 'debug-*=7d'. Repeatable."
    ),
    max_bytes: int | None = Option(
        None,
        parser=bytes_option,
        metavar="100GiB",
        help="Remove the oldest files and tables beyond this size.",
        show_default=False,
    ),
    segments_age: int | None = _age("Archived segments older than this expire.", "--segments-age"),
    grace: int | None = _age("Time to keep the bytes of removed objects, at least 1h. Default: 1d.", "--grace"),
    yes: Yes = False,
) -> int:
    """Expire entries that are older than a rule.

    The rule comes from the options, or else from the setting `retention`. Prints the objects, entries, bytes and
    monthly cost that would go. Pass --yes to apply.

    With --yes one log record states the time before which entries have expired, permanently, and removes the objects
    that hold no newer entry. From then on no lookup shows expired entries, and answers have expired_before_ms. The
    command also deletes the bytes of objects that were removed --grace ago, as `tiered-index orphans` does. The next
    merge leaves expired entries out. Writers and readers may run meanwhile. A writer with the setting does the same by
    itself.

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
        _write_expiry(session.out, index, planned, gone, config.prices, done=yes)
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
        raise ConfigError("no rule is given: give --age, --topic, --max-bytes or --segments-age, or retention")
    return given if grace is None else replace(given, grace_s=grace)


def _write_expiry(
    out: Output, index: StoredIndex, plan: ExpiryPlan, gone: Orphans, prices: PriceTable, *, done: bool
) -> None:
    document = {
        "status": "expired" if done else "planned",
        "log_number": index.log.state.number,
        "expired": plan.expired,
        "objects": [describe_object(stored) for stored in plan.objects],
        "segments": [{"object": s.name, "store": s.store, "bytes": s.object_bytes} for s in plan.segments],
        "entries": plan.entries,
        "bytes": plan.size_bytes,
        "usd_a_month": prices.month_usd(plan.size_bytes),
        "mixed_objects": len(plan.mixed),
        "mixed_entries": plan.mixed_entries,
        "unknown_topics": plan.unknown_topics,
        "deleted" if done else "to_delete": {"objects": len(gone.objects), "bytes": gone.size_bytes},
        **index.costs,
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
        out.remark("nothing was changed: pass --yes to apply")


def _horizons(expired: Expired) -> Sequence[str]:
    lines = []
    for horizon in expired.horizons:
        lines += [f"topics {pattern}: expired before {format_time(ms)}" for pattern, ms in horizon.topics if ms]
        if horizon.before_ms:
            rest = "other topics" if horizon.topics else "all topics"
            lines.append(f"{rest}: expired before {format_time(horizon.before_ms)}")
    return lines
