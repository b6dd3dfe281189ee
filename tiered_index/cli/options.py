"""Options that several commands have, each stated once; those of every command are in `session`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiered_index.cli.times import duration_option, time_option

# What writes to an index: ingest, import-classic.
Slots = Annotated[int | None, typer.Option(help="Hash slots a file; by default the index's or the preset's.")]
Items = Annotated[int | None, typer.Option(help="Items a file; by default the index's or the preset's.")]
Wait = Annotated[bool, typer.Option("--wait", help="Seal, compact and upload everything before exit.")]
Patience = Annotated[float, typer.Option(min=0, help="Seconds to wait out a full disk or a lost storage.")]

# What reads single files: inspect, dump, verify.
File = Annotated[
    str, typer.Argument(metavar="FILE", help="A path, a file id, or an object's name.", show_default=False)
]
FileSlots = Annotated[int | None, typer.Option(help="Hash slots of an unsealed file that has no journal.")]
FileItems = Annotated[int | None, typer.Option(help="Items of an unsealed file that has no journal.")]

# What looks keys up: query, message.
_LIMITS = "Limits"
MaxRequests = Annotated[
    int | None,
    typer.Option(
        "--max-requests",
        metavar="N",
        help="Requests to the storage at most.",
        show_default=False,
        rich_help_panel=_LIMITS,
    ),
]
MaxBytes = Annotated[
    int | None,
    typer.Option(
        "--max-bytes",
        metavar="BYTES",
        help="Bytes read from the storage at most.",
        show_default=False,
        rich_help_panel=_LIMITS,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="No request is begun after this time, opening the index included.",
        show_default=False,
        rich_help_panel=_LIMITS,
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Local cache of directories and filters, for later commands, too.",
        show_default=False,
    ),
]

# What merges: merge, spark merge.
Window = Annotated[
    int,
    typer.Option(
        parser=duration_option, metavar="1h|1d|30d", help="Length of a window, from the epoch on.", show_default="1d"
    ),
]
Tiers = Annotated[
    str | None, typer.Option(metavar="1d,30d", help="Several windows, one after the other; instead of --window.")
]
Begin = Annotated[int | None, typer.Option(parser=time_option, metavar="T", help="Only what begins here or later.")]
End = Annotated[
    int | None, typer.Option(parser=time_option, metavar="T", help="Only what ends here or earlier, inclusive.")
]
MinAge = Annotated[
    int,
    typer.Option(
        parser=duration_option, metavar="1h", help="Only windows that ended this long ago.", show_default="1h"
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show windows, sources, requests and cost; change nothing.")]

# What runs on Spark.
Master = Annotated[
    str | None,
    typer.Option(
        help="Where Spark runs: local[4], spark://host:7077, yarn; none: what spark-submit says, else this machine."
    ),
]
Conf = Annotated[
    list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark's; several times.")
]

Ship = Annotated[
    bool, typer.Option("--ship", help="Send this package to the executors, whose Python needs only what it depends on.")
]
Column = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD=COLUMN", help="Which column a field is, as key=order_id; several times."),
]
Constant = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD=VALUE", help="A field that every entry has, as topic=orders; several times."),
]
