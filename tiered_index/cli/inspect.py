"""`tiered-index inspect FILE`: what one index file says of itself."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tiered_index.cli.contents.bytes import opened
from tiered_index.cli.contents.kinds import contents_of
from tiered_index.cli.output import human_bytes
from tiered_index.cli.session import Session, command
from tiered_index.cli.times import format_time

__all__ = ["inspect"]

_TOPICS_SHOWN = 10


@command
def inspect(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A path, a file id, or an object's name.", show_default=False)],
    slots: Annotated[int | None, typer.Option(help="Hash slots of an unsealed file that has no journal.")] = None,
    items: Annotated[int | None, typer.Option(help="Items of an unsealed file that has no journal.")] = None,
) -> int:
    """Show header, geometry, metadata and directory statistics of one file; its entries are not checked (that is verify).

    [bold]Examples[/bold]

      tiered-index inspect /data/index/uploaded/001700000000000-0123456789ab.index

      tiered-index inspect data/001700000000000-0123456789ab/89abcdef01234567.index --storage s3://bucket/index --json

      tiered-index inspect store/index/20231114221320000 --slots 5000000 --items 20000000
    """
    with opened(session, file) as data:
        document: dict[str, Any] = {"file": data.name, "bytes": data.size_bytes, **contents_of(data, slots, items).describe()}
    if session.out.as_json:
        session.out.document(document)
        return 0
    session.out.line(f"{document['file']}: {document['kind']}, {human_bytes(document['bytes'])}")
    for name, part in document.items():
        if isinstance(part, dict):
            session.out.facts({key: _shown(key, value) for key, value in part.items()}, title=name)
    return 0


def _shown(name: str, value: Any) -> object:
    if name.endswith("_ms") and isinstance(value, int):
        return f"{value} ({format_time(value)})" if 0 <= value < 2**47 else value
    if name == "topics":
        names = [f"{text} ({topic_id})" for topic_id, text in value]
        return ", ".join(names[:_TOPICS_SHOWN]) + (f" and {len(names) - _TOPICS_SHOWN} more" if len(names) > _TOPICS_SHOWN else "")
    if isinstance(value, dict):
        return ", ".join(f"{key} = {number}" for key, number in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
