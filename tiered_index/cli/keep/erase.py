"""`tiered-index erase`: removes entries of a topic, of keys or of a queue. `spark erase` uses parts of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiered_index.base.units import MAX_TIMESTAMP_MS, format_time
from tiered_index.cli.exit_codes import DONE, FINDING
from tiered_index.cli.options import EraseOptions
from tiered_index.cli.output import Output, unknown_topic
from tiered_index.cli.session import Session, open_stored_index
from tiered_index.connectors.erase import messages_to_erase
from tiered_index.errors import InvalidArgument, listed
from tiered_index.service.jobs.erase import EraseRequest, Erasure
from tiered_index.service.jobs.erase import erase as erase_index
from tiered_index.service.read.caches.disk import CacheFolder, DiskCache
from tiered_index.service.root import CACHE

# fields of the certificate that people read as remarks
_AS_REMARKS = ("unknown_topics", "in_force", "unmatched_keys", "to_do")
# fields of the certificate that are empty in a plan
_OF_CHANGES = ("objects_removed", "entries_removed", "deleted", "segments", "log_numbers", "scan", "pending")


def erase_request(erasure: EraseOptions) -> EraseRequest:
    """Return the request that the options state. Raises `InvalidArgument`."""
    if erasure.queue is not None and erasure.before is None:
        raise InvalidArgument("--queue needs --before: the time before which the queue is erased")
    return EraseRequest(erasure.topic, tuple(erasure.key or ()), erasure.queue, erasure.before)


def erase(session: Session, *, erasure: EraseOptions, now: bool) -> int:
    """Erase the entries of a topic before a time: all, or those of some keys or of a queue."""
    return erase_here(session, erasure, now=now)


def erase_here(session: Session, erasure: EraseOptions, *, now: bool) -> int:
    """Erase in this process; return the exit code. Raises as `erase_request`."""
    request, config = erase_request(erasure), session.config()
    with open_stored_index(config) as index, session.out.progress("erasing", None) as bar:
        done = erase_index(
            index.storage,
            index.log,
            request,
            index.clock,
            yes=erasure.yes,
            now=now,
            grace_s=erasure.grace,
            threads=config.query_threads,
            messages=messages_to_erase(request, index.log.state),
            progress=lambda step, done, total: bar.update(done, f"{done:,} of {total:,} {step}", total),
        )
        folder, state = config.cache_dir or (config.root / CACHE if config.root is not None else None), index.log.state
        if erasure.yes and folder is not None and state.genesis is not None:
            # removed objects: the writer that would delete them may have ended
            cached = CacheFolder(DiskCache(folder, config.cache_max_bytes), state.genesis.index_id)
            cached.forget_unnamed(state.objects)
        costs = index.costs
    return write_erasure(session.out, done, costs, allow_none=erasure.allow_none)


def write_erasure(out: Output, done: Erasure, costs: Mapping[str, Any], *, allow_none: bool) -> int:
    """Write the certificate and the next steps; return the exit code. `allow_none`: nothing needs to match."""
    is_planned = done.status == "planned"
    out.show(
        {**done.to_dict(), **costs}, without=("asked", "tombstones", *_AS_REMARKS, *(_OF_CHANGES if is_planned else ()))
    )
    # the last second of 9999 ends in a year that no text can state
    until_ms = min(max(stone.before_ms for stone in done.tombstones), MAX_TIMESTAMP_MS)
    out.line(
        f"{'would hide' if is_planned else 'hidden permanently'}: entries with a time before {format_time(until_ms)}"
    )
    for topic in done.unknown_topics:
        out.remark(unknown_topic(topic, done.known_topics))
    for remark in [] if done.matches_all else unmatched(done, format_time(until_ms)):
        out.remark(remark)
    for step in done.to_do:
        out.remark(step)
    if is_planned:
        out.remark("nothing was changed: pass --yes to apply")
    is_done = done.status != "remains" and (allow_none or done.matches_all)
    return DONE if is_done else FINDING


def unmatched(done: Erasure, until: str) -> list[str]:
    """Return remarks about a request, or some of its keys, that no entry before the time `until` matches."""
    topic = f"topic {done.request.topic!r}"
    if keys := done.unmatched_keys:
        problem = f"no stored entry of {topic} before {until} has {listed([f'key {key!r}' for key in keys], 5)}"
    else:
        queue = "" if done.request.queue_id is None else f" in queue {done.request.queue_id}"
        problem = f"no entry of {topic}{queue} before {until} is stored"
    remarks = [problem if done.matched else f"nothing matches: {problem}"]
    left = "entries that a writer has not uploaded yet were not searched"
    if done.status == "planned":
        left += "; archived messages are searched with --now --yes"
        remarks.append(f"{left}. With --yes the erasure also covers what arrives later")
    else:
        remarks.append(f"{left}. The erasure is recorded, and also covers what arrives later: repeat it for its bytes")
    return remarks
