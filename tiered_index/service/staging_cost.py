"""What compacting staged files will cost: requests, bytes and dollars before anything is read or sent. Pure.

The counts follow from how a task works: a range for the document and one for 8 MiB of entries, a put or the parts of an upload, and a look
at what is there. What the writer does about a file, staging, adopting and sweeping it, is not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiered_index.service.staged import Ticket
from tiered_index.storage.metering import PriceTable

__all__ = ["CompactionCost", "estimate_compaction"]

_RANGE_BYTES = 8 << 20
_PART_BYTES = 16 << 20
_PROBE = {"put_if_absent": 2, "get": 1, "delete": 1}
_RECORD = {"list": 1, "head": 1, "put_if_absent": 1, "put": 1}
# of one log record: look for the end, is the last one there, append, checkpoint


@dataclass(frozen=True, slots=True)
class CompactionCost:
    """Estimates. `requests` by operation; `written_bytes` are of items: directories and filters add some 5%, more to small files."""

    requests: dict[str, int]
    read_bytes: int
    written_bytes: int
    cost_usd: float


def estimate_compaction(
    tickets: Sequence[Ticket], item_bytes: int, prices: PriceTable, *, looked: Mapping[str, int], looked_bytes: int
) -> CompactionCost:
    """Return what a job for `tickets` will cost. `looked`, `looked_bytes`: what looking at tickets and log has just cost."""
    requests = Counter(looked)
    requests.update(_PROBE)
    written = 0
    for ticket in tickets:
        size = ticket.count * item_bytes
        written += size
        requests["get_range"] += 1 + -(-ticket.entries_bytes // _RANGE_BYTES)
        requests["head"] += 1
        if size < 2 * _PART_BYTES:
            requests["put"] += 1
        else:
            requests["begin_upload"] += 1
            requests["upload_part"] += size // _PART_BYTES
            requests["complete_upload"] += 1
    if tickets:
        requests.update(_RECORD)
    read = looked_bytes + sum(ticket.size_bytes for ticket in tickets)
    return CompactionCost({name: count for name, count in requests.items() if count}, read, written, prices.cost_usd(requests, read))
