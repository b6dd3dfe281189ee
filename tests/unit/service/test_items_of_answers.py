"""Items of answers. The core makes them without a constructor; they equal those that the constructor makes."""

import copy
import pickle
from dataclasses import dataclass, fields

import numpy as np
import pytest

from tests.support.core import compiled_core, using
from tiered_index.format.schema import Schema
from tiered_index.kernels import compiled_views
from tiered_index.service.read.results import AnswerForm
from tiered_index.types import IndexItem, KeyedIndexItem, column


@dataclass(frozen=True, kw_only=True)
class Tagged(KeyedIndexItem):
    """Items with a column of their own."""

    tag: int = column(">u2")


def rows_of(schema, count=5):
    """Return rows with the least and the greatest values first."""
    rows = np.zeros(count, schema.row)
    for name in schema.row.names:
        info = np.iinfo(schema.row[name])
        rows[name][:2] = info.min, info.max
        rows[name][2:] = np.arange(count - 2)
    rows["second"] = np.arange(count)
    return rows


@pytest.mark.parametrize("kind", [IndexItem, KeyedIndexItem])
def test_items_of_the_core_are_those_of_the_constructor(kind):
    core, schema = compiled_core(), Schema.of(kind)
    rows = rows_of(schema)
    with using(core):
        form = AnswerForm(schema, kind)
        assert form.in_core is not None
        items = form.items("t", rows)
    with using(None):
        expected = AnswerForm(schema, kind).items("t", rows)
    assert items == expected and len(items) == 5
    assert [list(map(type, map(item.__getattribute__, item.__slots__))) for item in items] == [
        list(map(type, map(item.__getattribute__, item.__slots__))) for item in expected
    ]
    assert form.items("t", rows[:0]) == ()
    assert pickle.loads(pickle.dumps(items)) == copy.deepcopy(items) == expected
    assert [item.to_dict() for item in items] == [item.to_dict() for item in expected]
    assert list(items[0].to_dict()) == [each.name for each in fields(kind) if each.name != "source"]


def test_the_core_refuses_classes_and_rows_that_it_can_not_fill():
    compiled_core()
    make = compiled_views().ItemForm
    for kind, keyed in ((Tagged, True), (KeyedIndexItem, False), (IndexItem, True), (int, False), (object, False)):
        with pytest.raises((ValueError, AttributeError)):
            make(kind, keyed)
    for rows in (rows_of(Schema.of(Tagged)), rows_of(Schema.of(IndexItem)), np.zeros(3, "u1")):
        with pytest.raises(ValueError, match="columns that the items have not"):
            make(KeyedIndexItem, True).items("t", rows)
