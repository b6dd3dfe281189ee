"""How commands name the columns of a source: options, and what the pipeline takes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from tiered_index.cli.spark.sharing import pairs
from tiered_index.errors import InvalidArgument

__all__ = ["Column", "Constant", "given_columns", "spark_columns"]

Column = Annotated[
    list[str] | None, typer.Option(metavar="FIELD=COLUMN", help="Which column a field is, as key=order_id; several times.")
]
Constant = Annotated[
    list[str] | None, typer.Option(metavar="FIELD=VALUE", help="A field that every entry has, as topic=orders; several times.")
]


def given_columns(column: Sequence[str] | None, constant: Sequence[str] | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return both as dicts. Raises `InvalidArgument`, before a session is made."""
    columns, constants = pairs("--column", column), pairs("--constant", constant)
    if both := sorted(columns.keys() & constants.keys()):
        raise InvalidArgument(f"{both[0]} is given by --column and by --constant")
    for name, value in constants.items():
        if name not in ("topic", "key") and not value.removeprefix("-").isdecimal():
            raise InvalidArgument(f"--constant {name}={value}: a whole number is needed")
    return columns, constants


def spark_columns(columns: Mapping[str, str], constants: Mapping[str, str]) -> dict[str, Any]:
    """Return what `build` takes: constants as Spark columns, text where a field is text. Needs a session."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    return {**columns, **{name: F.lit(value if name in ("topic", "key") else int(value)) for name, value in constants.items()}}
