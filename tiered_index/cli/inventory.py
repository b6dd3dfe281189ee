"""`tiered-index du`: what is stored and what it costs."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from tiered_index.cli.asking import asked_service
from tiered_index.cli.options import CacheDir, TokenFile, Url
from tiered_index.cli.output import counted, human_bytes, human_count
from tiered_index.cli.session import Session, command
from tiered_index.service.lookup.inventory import du_document, du_groups


@command
def du(
    session: Session,
    by: Annotated[
        str, Option(metavar="topic,day,state", help="What rows are of: one of these words, or several by commas.")
    ] = "topic,day,state",
    cache_dir: CacheDir = None,
    url: Url = None,
    token_file: TokenFile = None,
) -> int:
    """Show what is stored and what it costs: entries, bytes and dollars a month by topic, day and state.

    Days are of UTC. A topic has a share of a file's bytes as of its entries; the entries of a file of several days are
    taken to be spread evenly over them (~). Dollars are of what lies in the storage, by the settings' prices (S3
    Standard's list price by default), without requests. Archived segments are a row of their own. Objects that no
    record names (`orphans`) and the log are not counted. It reads the directory of each stored file, as `topics` does.

    [bold]Examples[/bold]

      tiered-index du --storage s3://bucket/index --by topic

      tiered-index du --root /data/index --json

      tiered-index du --url http://localhost:8080 --token-file token
    """
    groups = du_groups(by)
    if (client := asked_service(session, url, token_file, cache_dir=cache_dir)) is not None:
        with client:
            document = client.du(",".join(groups))
    else:
        config = session.config(cache_dir=cache_dir)
        with session.open_reader(config) as reader:
            table = reader.du()
            document = du_document(table, groups, reader.genesis.index_id, reader.log_state.number, config.prices)
    rows, totals = document["rows"], document["totals"]
    session.out.answer(document)
    session.out.table(
        (*groups, "entries", "bytes", "$ a month"),
        [_shown(row, groups) for row in rows],
        right="entries bytes $ a month",
        brief=(*groups, "entries", "bytes", "$ a month"),
    )
    session.out.line(
        f"{counted(totals['entries'], 'entry', 'entries')}, {human_bytes(totals['bytes'])}; what of it lies in the "
        f"storage costs ${_dollars(totals['usd_a_month'])} a month at ${document['usd_per_gib_month']:g} a GiB"
    )
    return 0


def _shown(row: dict[str, Any], groups: list[str]) -> tuple[object, ...]:
    about = "~" if row["estimated"] else ""
    return (
        *(row[name] for name in groups),
        about + human_count(row["entries"]),
        about + human_bytes(row["bytes"]),
        _dollars(row["usd_a_month"]),
    )


def _dollars(usd: float) -> str:
    return f"{usd:,.2f}" if usd >= 1 else f"{usd:.6f}"
