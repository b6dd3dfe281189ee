"""The keys that a record is found by."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tiered_index.errors import InvalidArgument
from tiered_index.kafka import keys as keys_module
from tiered_index.kafka.keys import Keys
from tiered_index.kafka.record import KafkaRecord


def record(key=None, value=None, *headers, offset=0) -> KafkaRecord:
    return KafkaRecord("orders", 3, offset, key, value, headers)


def document(**fields) -> bytes:
    return json.dumps(fields).encode()


def test_the_key_is_its_text_or_its_hexadecimal_digits():
    keys = Keys(("key",))
    assert keys.take(record(b"order-\xc3\xa4")) == ["order-ä"]
    assert keys.take(record(b"\x00\xff")) == ["0x00ff"]
    assert keys.only_key


def test_a_null_key_and_an_empty_one_are_counted():
    keys = Keys(("key",))
    assert keys.take(record(None)) == keys.take(record(b"")) == keys.take(record(b"x" * 32_768)) == []
    assert keys.without_key == 3
    assert keys.take(record(b"x" * 32_767))


def test_headers_by_name_each_occurrence():
    keys = Keys(("header:trace", "key"))
    found = keys.take(record(b"k", None, ("trace", b"1"), ("other", b"2"), ("trace", b"3"), ("trace", None)))
    assert found == ["k", "1", "3"]
    assert not keys.only_key


def test_fields_of_json_arrays_give_several_keys():
    keys = Keys(("json:order.id", "json:items[].sku"))
    value = document(order={"id": 4711}, items=[{"sku": "a"}, {"sku": "b"}, {"sku": "a"}, {}])
    assert keys.take(record(None, value)) == ["4711", "a", "b"]
    assert keys.take(record(None, document(order={"id": True}))) == ["true"]
    assert keys.take(record(None, document(order={"id": {"no": "scalar"}}))) == []
    assert keys.take(record(None, document(order={"id": "\ud800"}))) == []
    assert keys.without_key == 2


def test_a_value_that_is_no_json_is_counted_and_named():
    keys = Keys(("json:id",))
    for offset in range(12):
        assert keys.take(record(None, b"{no json", offset=offset)) == []
    keys.take(record(None, b"[" * 100_000, offset=12))
    assert keys.take(record(None, None)) == []  # a tombstone is no damage
    assert (keys.no_json, keys.without_key) == (13, 14)
    keys.of(record(None, b"{"))  # asks, and counts nothing
    assert (keys.no_json, keys.without_key) == (13, 14)
    assert keys.no_json_first == [f"orders/3/{n}" for n in range(10)]


def test_a_function_gives_keys_of_any_format():
    keys = Keys(function=lambda one: [one.value.decode()[::-1], ""])
    assert keys.take(record(None, b"abc")) == ["cba"]
    assert not keys.only_key


@pytest.mark.parametrize("text", ["keys", "header:", "json:", "json:a[", "avro:id", ""])
def test_what_is_no_key_is_refused(text):
    with pytest.raises(InvalidArgument, match="--key"):
        Keys((text,))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("items[?contains(n, t)].id", b'{"items": [{"n": "x", "t": 7, "id": 1}]}'),
        ("merge(a, b)", b'{"a": {}}'),
        ("max_by(items, &n)", b'{"items": [{"n": 1}, {"n": "x"}]}'),
        ("ceil(n)", b'{"n": 1e999}'),
        ("floor(n)", b'{"n": NaN}'),
        ("items[::0]", b'{"items": [1]}'),
        ("&id", b'{"id": 1}'),
        ("sum(n)", b'{"n": [' + b"9" * 4300 + b", " + b"9" * 4300 + b"]}"),
    ],
)
def test_no_value_ends_the_run_by_an_error_of_the_path(path, value):
    keys = Keys((f"json:{path}", "key"))
    assert keys.take(record(b"k", value)) == ["k"]


def test_a_value_that_a_function_of_the_path_refuses_lacks_that_key():
    keys = Keys(("json:length(items)", "json:sort(tags)", "json:id"))
    assert keys.take(record(None, document(id=7))) == ["7"]
    assert keys.take(record(None, document(id=8, items=[1, 2], tags=["a", 1]))) == ["2", "8"]
    assert keys.take(record(None, document(tags=[1, "a"]))) == []
    assert (keys.without_key, keys.no_json) == (1, 0)


@pytest.mark.parametrize(("path", "found"), [("ids", ["a", "7", "b"]), ("to_string(ids)", []), ("sort(ids)", [])])
def test_arrays_of_more_levels_than_the_stack_of_python(monkeypatch, path, found):
    deep = ["7"]
    for _ in range(1_200):
        deep = [deep]
    # the parser of Python 3.11 accepts fewer levels
    monkeypatch.setattr(keys_module, "json", SimpleNamespace(loads=lambda _: {"ids": ["a", *deep, "b"]}))
    assert Keys((f"json:{path}", "key")).take(record(b"k", b"{}")) == ["k", *found]


@pytest.mark.parametrize("path", ["lower(id)", "items[].lower(id)", "length(a, b)", "{a: [lower(id)]}"])
def test_a_function_that_jmespath_does_not_have_is_refused_at_once(path):
    with pytest.raises(InvalidArgument, match="can't be read as JMESPath"):
        Keys((f"json:{path}",))


def test_a_rule_of_an_index_with_an_unknown_function_finds_no_key():
    assert Keys(("json:lower(id)", "key"), are_new=False).take(record(b"k", b'{"id": "A"}')) == ["k"]
