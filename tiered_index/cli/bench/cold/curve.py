"""Requests and bytes of `query_many` against the number of keys, on a few files of full size.

Counts only: the storage is a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiered_index.cli.bench.cold.files import StoredFiles
from tiered_index.cli.bench.cold.readers import open_reader, warm
from tiered_index.cli.bench.messages import TOPIC
from tiered_index.cli.bench.setting import require
from tiered_index.cli.bench.table import Table
from tiered_index.config import IndexConfig
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.types import Lookup

__all__ = ["curve_table"]

_GAPS = (IndexConfig.model_fields["coalesce_gap_bytes"].default, 0)


def curve_table(files: StoredFiles, keys: Sequence[int]) -> Table:
    """Ask for keys, each in one of the files, drawn at random; return requests and MiB for every number of keys and
    setting.
    """
    own = (files.layout.capacity - files.shared) * files.count
    drawn = files.own_keys(np.random.default_rng(7).choice(own, max(keys), replace=False))
    columns, results = ["keys"], []
    for cache, filters in ((None, "no filters"), (files.cache, "filters at hand")):
        for gap in _GAPS:
            columns += [f"requests ({filters}, gap {gap >> 10} KiB)", "MiB"]
            with open_reader(LocalStorage(files.objects), cache, coalesce_gap_bytes=gap) as reader:
                warm(reader, files)
                for count in keys:
                    answers = reader.query_many([Lookup(topic=TOPIC, key=key) for key in drawn[:count]])
                    found = int(answers.counts.sum())
                    require(found if files.layout.schema.keyed else min(found, count), count, "answers of query_many")
                    results.append((answers.explain.requests, answers.explain.bytes / (1 << 20)))
    rows: list[tuple[Any, ...]] = []
    for at, count in enumerate(keys):
        pairs = [results[place] for place in range(at, len(results), len(keys))]
        rows.append((count, *(value for pair in pairs for value in pair)))
    layout = files.layout
    title = (
        f"query_many on {files.count} files of {layout.slots:,} slots and {layout.items:,} items, each key in "
        f"one of them"
    )
    return Table(title, tuple(columns), tuple(rows))
