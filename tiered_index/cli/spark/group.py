"""`tiered-index spark`: the group and its commands."""

from __future__ import annotations

import typer

from tiered_index.cli.spark.audit import audit
from tiered_index.cli.spark.build import build, compact, merge
from tiered_index.cli.spark.lookup import lookup

__all__ = ["spark"]

spark = typer.Typer(
    name="spark",
    help="Build, merge, look up and audit on Spark, where one machine ends.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
spark.command("build")(build)
spark.command("merge")(merge)
spark.command("compact")(compact)
spark.command("lookup")(lookup)
spark.command("audit")(audit)
