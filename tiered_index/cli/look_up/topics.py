"""`tiered-index topics`: the topics of an index, and sums of their entries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered_index.cli.look_up.paging import CommandBudget, Pages
from tiered_index.cli.options import LimitOptions, RangeOptions, ServiceOptions
from tiered_index.cli.output import counted, human_bytes
from tiered_index.cli.session import Session, asked_service
from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.service.jobs.segments.ranges import droppable
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.compacted import DamagedFile
from tiered_index.service.read.inventory import du_document, du_groups
from tiered_index.types import TopicsResult

if TYPE_CHECKING:
    from tiered_index.client import IndexClient
    from tiered_index.service.reader import IndexReader


def topics(
    session: Session,
    *,
    allow_partial: bool,
    by: str | None,
    within: RangeOptions,
    limits: LimitOptions,
    service: ServiceOptions,
) -> int:
    """List the topics, each with its entries, bytes of entries and time range."""
    client = asked_service(session, service)
    if by is not None:
        if allow_partial or within != RangeOptions() or limits != LimitOptions():
            raise InvalidArgument("--by sums all entries: leave --begin, --end, --allow-partial and all limits out")
        if len(session.storages) > 1:
            raise InvalidArgument("--by sums the entries of one index: give --storage once")
        return _show_sums(session, client, by)
    budget = CommandBudget(limits.of_lookups)
    config = session.reader_config()
    with contextlib.ExitStack() as stack:
        bounds = {"begin_ms": within.begin, "end_ms": within.end, "allow_partial": allow_partial}
        opened = partial(_open_topics, stack, session, config, client, bounds)
        nothing = TopicsResult(topics=(), status="partial")
        pages = Pages(opened, nothing, None, budget, every=False, within=within)
        (answer,) = pages
        if pages.reader is not None and any(map(_has_replaced, pages.reader._log_states())):
            pages.more_hints.append(
                "the counts include rows of files that newer readings replaced, until a merge leaves them out"
            )
        session.out.answer(answer.to_dict() | pages.seen() | pages.error())
        session.out.rows("", [topic.to_dict() for topic in answer.topics], most=len(answer), is_listed=False)
        session.out.line(f"{counted(len(answer), 'topic')}, {pages.conclusion}{pages.as_of()}{pages.expired}")
        return pages.finish(session.out)


def _has_replaced(state: LogState) -> bool:
    """Return whether files may have entries of replaced rows."""
    without = droppable(state)
    stores = state.expired.replaced.stores.items()
    return any(len(ranges.retired) > len(without.get(store, ())) for store, ranges in stores)


def _open_topics(
    stack: contextlib.ExitStack, session: Session, config: IndexConfig, client: IndexClient | None, bounds: Any
) -> tuple[IndexReader | None, list[Callable[..., TopicsResult]]]:
    """Open the index or the client, as `Pages.open`."""
    if client is not None:
        stack.enter_context(client)
        return None, [partial(client.topics, explain=session.out.as_json, **bounds)]
    reader = stack.enter_context(session.open_reader(config, with_writers=True))
    return reader, [partial(reader.topics, **bounds)]


def _show_sums(session: Session, client: IndexClient | None, by: str) -> int:
    """Write stored entries, bytes and cost by some columns, and return the exit code."""
    groups = du_groups(by)
    if client is not None:
        with client:
            document = client.du(",".join(groups))
    else:
        config = session.config()
        with session.open_reader(config) as reader:
            table = reader.du()
            document = du_document(table, groups, reader.genesis.index_id, reader.log_state.number, config.prices)
            document["rows"] = list(document["rows"])
            # a root answers without its storage
            for file in reader.files():
                if isinstance(file, DamagedFile):
                    document.setdefault("not_asked", str(file.error))
    rows, totals = document["rows"], document["totals"]
    session.out.answer(document)
    session.out.rows("", rows, most=len(rows), is_listed=False)
    session.out.line(
        f"{counted(totals['entries'], 'entry', 'entries')}, {human_bytes(totals['bytes'])}; objects in the "
        f"storage cost ${totals['usd_a_month']:,.6f} a month at ${document['usd_per_gib_month']:g} a GiB"
    )
    if document.get("not_asked"):
        session.out.line(f"only the root's files are counted: the storage could not be read: {document['not_asked']}")
    return 0
