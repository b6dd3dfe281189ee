"""`tiered-index migrate`: files and window tables of another layout are rewritten, a dry run unless --yes."""

from __future__ import annotations

from typing import Any

from typer import Option

from tiered_index.cli.merge import counting
from tiered_index.cli.output import counted, human_bytes
from tiered_index.cli.session import Session, command, open_stored_index
from tiered_index.service.merge.migrate import FileLayout, plan_migration
from tiered_index.service.merge.migrate import migrate as rewrite
from tiered_index.storage.opening import probe_put_if_absent
from tiered_index.types import format_time

_SHOWN = 20


@command
def migrate(
    session: Session,
    layout: FileLayout = Option(
        "packed", help="packed, as this version writes; plain, which versions before it read, too."
    ),
    threads: int = Option(2, min=1, help="Shards of a table at the same time."),
    yes: bool = Option(False, "--yes", help="Do it."),
) -> int:
    """Rewrite stored files and window tables in the present layout, or in the one before.

    Nothing needs it: every version reads what earlier ones wrote. It makes old objects as small as new ones, and with
    --layout plain it prepares for going back. Each file or table is replaced by one log record, proven before by the
    counts and checksums of its entries; writers, readers and merges may be at work. The old objects go by `tiered-index
    orphans`. Files of preset rocketmq stay as they are. Repeating it is harmless.

    [bold]Examples[/bold]

      tiered-index migrate --storage s3://bucket/index

      tiered-index migrate --storage s3://bucket/index --yes

      tiered-index migrate --storage s3://bucket/index --layout plain --yes --json
    """
    with open_stored_index(session.config()) as index:
        planned = plan_migration(index.storage, index.log.state, layout)
        objects, out = planned.objects, session.out
        entries, size = sum(stored.count for stored in objects), sum(stored.size_bytes for stored in objects)
        written: dict[str, Any] = {}
        if yes and objects:
            probe_put_if_absent(index.storage)
            with session.progress(f"rewriting {layout}", entries) as progress:
                report = rewrite(
                    index.storage, index.log, index.clock, layout, threads=threads, progress=counting(progress)
                )
            numbers = ("jobs", "sources", "shards", "entries", "expired", "read_bytes", "written_bytes")
            written = {name: getattr(report, name) for name in numbers}
        total = index.storage.total
        out.answer(
            {
                "status": "migrated" if yes else "planned",
                "layout": layout,
                "log_number": index.log.state.number,
                "objects": [
                    {"object": stored.name, "entries": stored.count, "bytes": stored.size_bytes} for stored in objects
                ],
                "entries": entries,
                "bytes": size,
                "right": planned.right,
                **({"written": written} if written else {}),
                "requests": total.requests_by_kind,
                "cost_usd": total.cost_usd,
            }
        )
        lines = [
            f"{stored.name}  {counted(stored.count, 'entry', 'entries')}  {human_bytes(stored.size_bytes)}  "
            f"{format_time(stored.second_min * 1000)} to {format_time(stored.second_max * 1000)}"
            for stored in objects
        ]
        out.first(_SHOWN, lines, lambda rest: f"and {counted(rest, 'further object')}")
        are = "is as it" if planned.right == 1 else "are as they"
        right = f"{counted(planned.right, 'object')} {are} should be"
        if written:
            out.line(
                f"{counted(written['sources'], 'object')} with {counted(written['entries'], 'entry', 'entries')} "
                f"rewritten {layout}: {human_bytes(written['read_bytes'])} became "
                f"{human_bytes(written['written_bytes'])}; {right}"
            )
        else:
            out.line(
                f"{counted(len(objects), 'object')} with {counted(entries, 'entry', 'entries')} "
                f"{'' if yes else 'would be '}rewritten {layout}: {human_bytes(size)}; {right}"
            )
        if objects and not yes:
            out.remark("nothing was changed: --yes does that")
    return 0
