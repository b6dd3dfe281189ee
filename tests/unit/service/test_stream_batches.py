"""The last batch of each stream in the log: records, checkpoints, and what they add up to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.service.test_segment_archive import GENESIS
from tiered_index.errors import CorruptFile
from tiered_index.service.log.records import LogRecord, StreamBatch, encode_document
from tiered_index.service.log.state import LogState

told = st.builds(StreamBatch, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1))


@given(st.dictionaries(st.text(max_size=5), told, max_size=3))
def test_batches_come_back_as_they_were(batches):
    record, state = LogRecord(7, "build", 0, "a", 5, batches=batches), LogState(7, 3, GENESIS, batches=batches)
    assert LogRecord.decode(record.encode(), "x") == record
    assert LogState.decode(state.encode(), "x") == state


def test_records_and_checkpoints_of_before_have_none():
    for kind in (LogRecord(7, "build", 0, "a", 5), LogState(7, 3, GENESIS)):
        document = json.loads(kind.encode().partition(b"\n")[0])
        assert "batches" not in document and type(kind).decode(encode_document(document), "x").batches == {}


def test_the_document_is_the_one_of_the_specification():
    record = LogRecord(7, "build", 0, "a", 5, batches={"spark:q": StreamBatch(4, 400, 0xFEED)})
    assert json.loads(record.encode().partition(b"\n")[0])["batches"] == {
        "spark:q": {"number": 4, "entries": 400, "checksum": "000000000000feed"}
    }


SHORT = {"number": 4, "entries": 1}


@pytest.mark.parametrize("wrong", [5, None, "x", [1], {"s": 4}, {"s": SHORT}, {"s": {**SHORT, "checksum": 7}}])
def test_batches_of_the_wrong_shape_are_damage(wrong):
    for kind in (LogRecord(7, "build", 0, "a", 5), LogState(7, 3, GENESIS)):
        document = json.loads(kind.encode().partition(b"\n")[0])
        with pytest.raises(CorruptFile, match="this version"):
            type(kind).decode(encode_document(document | {"batches": wrong}), "x")


def test_the_greatest_number_of_each_stream_counts():
    state = LogState().apply(LogRecord(1, "create", 0, "a", 5, genesis=GENESIS), "x")
    begun = state
    for number, batches in enumerate([{"a": 1}, {"b": 7}, {"a": 3}, {}, {"a": 2, "b": 8}], 2):
        record = LogRecord(
            number, "build", 0, "a", 5, batches={s: StreamBatch(at, number, 0) for s, at in batches.items()}
        )
        state = state.apply(record, "x")
    assert state.batches == {"a": StreamBatch(3, 4, 0), "b": StreamBatch(8, 6, 0)} and begun.batches == {}
