"""The type stub of settings by name, made from the declaration of `IndexConfig`.

`python -m tests.support.settings_stub` writes it again.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from tiered_index import config

STUB = Path(config.__file__).with_name("_settings.pyi")
_HEAD = '''"""The settings by name; None counts as not given. `python -m tests.support.settings_stub` makes it."""

from pathlib import Path
from typing import Any, Literal, TypedDict

from tiered_index.config import OffsetSpace
from tiered_index.retention import Retention
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.s3.options import S3Options
from tiered_index.types import IndexItem

class IndexSettings(TypedDict, total=False):
'''
_NAMING = ("root", "storage", "item_type")


def stub() -> str:
    """Return the text of the stub: `IndexSettings`, and `Settings` with the names of an index and of its entries."""
    (declared,) = ast.parse(inspect.getsource(config.IndexConfig)).body
    assert isinstance(declared, ast.ClassDef)
    kinds = {}
    for line in declared.body:
        if isinstance(line, ast.AnnAssign):
            name, kind = ast.unparse(line.target), ast.unparse(line.annotation).replace("'", '"')
            if name in config.TABLES:
                kind += " | dict[str, Any]"
            kinds[name] = f"{kind.replace('Path', 'str | Path').removesuffix(' | None')} | None"
    lines = [f"    {name}: {kind}\n" for name, kind in kinds.items() if name not in _NAMING]
    naming = [f"    {name}: {kind}\n" for name, kind in kinds.items() if name in _NAMING]
    return "".join([_HEAD, *lines, "\nclass Settings(IndexSettings, total=False):\n", *naming])


if __name__ == "__main__":
    STUB.write_text(stub())
