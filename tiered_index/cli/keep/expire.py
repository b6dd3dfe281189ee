"""`tiered-index expire`: removes entries that are older than the retention rule; without --yes it prints the plan."""

from __future__ import annotations

from dataclasses import asdict

from tiered_index.base.units import format_time
from tiered_index.cli.output import counted, describe_object, human_bytes, unknown_topic
from tiered_index.cli.session import Session, open_stored_index
from tiered_index.errors import ConfigError, listed
from tiered_index.service.jobs.expiry import ExpiryPlan, SegmentTotals
from tiered_index.service.jobs.expiry import expire as expire_index
from tiered_index.service.read.files.cold_path import ColdSettings


def expire(session: Session, *, now: bool, yes: bool) -> int:
    """Expire entries by age, topic or size."""
    config = session.config()
    if not config.retention.any:
        raise ConfigError(
            "no rule is given: pass --set retention.age_s=365d, for example, or --config FILE with [retention]"
        )
    with open_stored_index(config) as index:
        known = index.log.state.expired
        plan, gone = expire_index(
            index.storage, index.log, config.retention, index.clock, yes=yes, now=now, settings=ColdSettings.of(config)
        )
        document = {
            "status": "expired" if yes else "planned",
            "log_number": index.log.state.number,
            "expired": plan.expired,
            "objects": [describe_object(stored) for stored in plan.objects],
            "segments": [{"object": s.name, "store": s.store, "bytes": s.object_bytes} for s in plan.segments],
            "archive": {
                "expired" if yes else "to_expire": asdict(plan.segments_expired),
                "kept": asdict(plan.segments_kept),
                "kept_of_expired_age": asdict(plan.segments_of_age),
            },
            "entries": plan.entries,
            "bytes": plan.size_bytes,
            "usd_a_month": config.prices.month_usd(plan.size_bytes),
            "mixed_objects": len(plan.mixed),
            "mixed_entries": plan.mixed_entries,
            **({"rewritten": plan.rewritten, "entries_removed": plan.entries_removed} if yes and now else {}),
            "unknown_topics": plan.unknown_topics,
            "deleted" if yes else "to_delete": {"objects": len(gone.objects), "bytes": gone.size_bytes},
            **index.costs,
        }
    session.out.show(document, without=("expired", "unknown_topics", "archive"))
    limits = plan.expired.limits()
    for pattern, ms in limits.items():
        topics = pattern or ("other topics" if len(limits) > 1 else "all topics")
        known_ms = known.limits()[None] if pattern is None else known.before_ms(pattern)
        if ms:
            session.out.line(
                f"{topics}: {'expired' if yes or ms <= known_ms else 'would expire'} before {format_time(ms)}"
            )
    if plan.segments or plan.segments_kept.segments:
        _tell_archive(session, plan, yes=yes)
    for pattern in plan.unknown_topics:
        session.out.remark(unknown_topic(pattern, plan.known_topics))
    if not yes:
        session.out.remark("nothing was changed: pass --yes to apply")
    return 0


def _tell_archive(session: Session, plan: ExpiryPlan, *, yes: bool) -> None:
    """Tell people which archived segments expire, and which stay though the entries of their age expire."""
    gone, staying = map(_summed, (plan.segments_expired, plan.segments_kept))
    session.out.line(f"archive: {'expired' if yes else 'would expire'}: {gone}; kept: {staying}")
    if plan.segments_of_age.segments:
        session.out.remark(
            f"of the archive, {_summed(plan.segments_of_age)} were uploaded before the entries' time above, and stay: "
            "to expire them, too, set retention.segments_age_s or retention.segments_topics.TOPIC"
        )


def _summed(sums: SegmentTotals) -> str:
    topics = [f"{topic}: {counted(offsets, 'offset')}" for topic, offsets in sums.offsets_by_topic.items()]
    details = "; ".join([human_bytes(sums.bytes), *([listed(topics)] if topics else [])])
    return f"{counted(sums.segments, 'segment')} ({details})" if sums.segments else "no segment"
