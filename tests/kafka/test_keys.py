"""The keys that a record is found by."""

import json
import struct
import uuid
from types import SimpleNamespace

import pyarrow as pa
import pytest

from tiered_index.connectors.kafka import keys as keys_module
from tiered_index.connectors.kafka.keys import RecordKeys
from tiered_index.connectors.kafka.record import KafkaRecord
from tiered_index.errors import InvalidArgument

ID = uuid.UUID("6f1d2c3b-4a59-4687-9788-112233445566")


def record(key=None, value=None, *headers, offset=0) -> KafkaRecord:
    return KafkaRecord("orders", 3, offset, key, value, headers)


def document(**fields) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("rule", "data", "text"),
    [
        ("key", b"order-\xc3\xa4", "order-ä"),
        ("key", struct.pack(">q", 42), "0x000000000000002a"),
        ("key:int64", struct.pack(">q", 42), "42"),
        ("key:int64", struct.pack(">q", -1), "-1"),
        ("key:float64", struct.pack(">d", 0.1), "0.1"),
        ("key:uuid", ID.bytes, str(ID)),
        ("key:uuid", str(ID).upper().encode(), str(ID)),
        # not of the type: as without it
        ("key:int64", struct.pack(">i", 42), "0x0000002a"),
        ("key:uuid", b"order-1", "order-1"),
    ],
)
def test_keys_are_texts_or_of_a_type_or_hexadecimal_digits(rule, data, text):
    keys, of_header = RecordKeys((rule,)), RecordKeys((rule.replace("key", "header:id"),))
    assert keys.take(record(data)) == of_header.take(record(None, None, ("id", data))) == [text]
    some = keys.plain_keys(pa.array([data, data], pa.binary()))
    assert some is None or some.to_pylist() == [text, text]
    assert keys.plain_keys(pa.array([data, None], pa.binary())) is None


WRITTEN = ["12345678901234567.25", "12345678901234567.75", "10.50", "1E+3", "-0", "0", "-0.0", "4711", "1" * 40]


@pytest.mark.parametrize("rule", ["json:order.id", "json:[order.id][0]", "json:order"])
def test_numbers_of_json_are_keys_as_they_were_written(rule):
    keys = RecordKeys((rule,))
    document = '{"order": %s}' if rule == "json:order" else '{"n": 1e400, "order": {"id": %s}}'
    assert [keys.take(record(None, (document % text).encode())) for text in WRITTEN] == [[text] for text in WRITTEN]
    assert keys.take(record(None, (document % '["a", 1.50, [-0, true], null]').encode())) == ["a", "1.50", "-0", "true"]


@pytest.mark.parametrize(
    "value",
    [
        b'{"order": {"id": "j"}}',
        b'\xef\xbb\xbf{"order": {"id": "j"}}',
        '{"order": {"id": "j"}}'.encode("utf-16"),
        b'\0\0\0\0\7{"order": {"id": "j"}}',
        b'{"order": {"id": "first"}, "order": {"id": "j"}}',
        b'{"half": "\\ud83d", "order": {"id": "j"}}',
    ],
)
def test_json_as_producers_write_it(value):
    for rule in ("json:order.id", "json:order | id"):
        keys = RecordKeys((rule,))
        assert (keys.take(record(None, value)), keys.no_json) == (["j"], 0)


def test_plain_paths_agree_with_the_expressions():
    rules = ("json:a", "json:a.b", "json:a.b.c", 'json:"x y"."no field"', "json:z")
    values = ["{}", '{"a": 1}', '{"a": {"b": 2}}', '{"a": {"b": {"c": "d"}}}', '{"x y": {"no field": [3, {"c": 1}]}}']
    values += ['{"a": null, "z": 10.50}', "[1]", '"a"', '{"a": [{"b": 1}]}', '{"a": "t", "z": false}']
    plain, whole = RecordKeys(rules), RecordKeys((*rules, "json:nothing[0]"))
    assert plain._fields is not None and whole._fields is None
    for value in values:
        assert plain.take(record(None, value.encode())) == whole.take(record(None, value.encode())), value


@pytest.mark.parametrize(
    ("rules", "keys"),
    [
        (["order=key"], ["order=7"]),
        (["key", "order=key"], ["7", "order=7"]),
        (["o.d-er=header:id", "user=json:user"], ["o.d-er=8", "user=9"]),
        (["user=json:user"], ["user=9"]),
        (["user=json:user", "user=json:more.user"], ["user=9", "user=10"]),
        (["user=json:user | @", "more=json:more.*"], ["user=9", "more=10"]),
        (["number=header:number:int16"], ["number=12"]),
        # no name, but a comparison
        (["json:user=='9'"], ["true"]),
    ],
)
def test_a_name_is_before_each_key_of_its_rule(rules, keys):
    value = document(user="9", more={"user": 10})
    of_record = record(b"7", value, ("id", b"8"), ("number", struct.pack(">h", 12)))
    for extraction in (RecordKeys(rules), RecordKeys.by_rules(rules)):
        assert sorted(extraction.take(of_record)) == sorted(extraction.of(of_record)) == sorted(keys)
    record_keys = RecordKeys(rules)
    if (columns := record_keys.plain_keys(pa.array([b"7", b"7"], pa.binary()))) is not None:
        assert columns.to_pylist() == keys * 2
    if record_keys.only_path:
        assert record_keys.take_text(value) == keys[0]


def test_a_name_without_a_key_is_none_and_counts_to_its_length():
    keys, most = RecordKeys(("order=key", "user=json:user", "id=header:id")), "x" * (32_767 - len("order="))
    assert keys.take(record(b"", document(user=""), ("id", b""))) == []
    assert keys.take(record(f"{most}x".encode())) == []
    assert (keys.without_key, keys.too_long) == (1, 1)
    assert keys.take(record(most.encode())) == [f"order={most}"]
    assert RecordKeys(("order=key",)).plain_keys(pa.array([f"{most}x".encode()] * 2, pa.binary())) is None


def test_a_null_key_and_an_empty_one_are_counted():
    keys = RecordKeys(("key",))
    assert keys.take(record(None)) == keys.take(record(b"")) == keys.take(record(b"x" * 32_768)) == []
    assert (keys.without_key, keys.too_long) == (2, 1)
    assert keys.take(record(b"x" * 32_767))


def test_fields_of_json_arrays_give_several_keys():
    keys = RecordKeys(("json:order.id", "json:items[].sku"))
    value = document(order={"id": 4711}, items=[{"sku": "a"}, {"sku": "b"}, {"sku": "a"}, {}])
    assert keys.take(record(None, value)) == ["4711", "a", "b"]
    assert keys.take(record(None, document(order={"id": True}))) == ["true"]
    assert keys.take(record(None, document(order={"id": {"no": "scalar"}}))) == []
    assert keys.take(record(None, document(order={"id": "\ud800"}))) == []
    assert keys.without_key == 2


def test_a_value_that_is_no_json_is_counted_and_named():
    keys = RecordKeys(("json:id",))
    for offset in range(12):
        assert keys.take(record(None, b"{no json", offset=offset)) == []
    keys.take(record(None, b"[" * 100_000, offset=12))
    assert keys.take(record(None, None)) == []  # a tombstone is no damage
    assert (keys.no_json, keys.without_key) == (13, 14)
    keys.of(record(None, b"{"))  # counts nothing
    assert (keys.no_json, keys.without_key) == (13, 14)
    assert keys.no_json_first == [f"orders/3/{n}" for n in range(10)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("items[?contains(n, t)].id", b'{"items": [{"n": "x", "t": 7, "id": 1}]}'),
        ("ceil(n)", b'{"n": 1e999}'),
        ("sum(n)", b'{"n": [' + b"9" * 4300 + b", " + b"9" * 4300 + b"]}"),
    ],
)
def test_no_value_ends_the_run_by_an_error_of_the_path(path, value):
    keys = RecordKeys((f"json:{path}", "key"))
    assert keys.take(record(b"k", value)) == ["k"]


def test_a_value_that_a_function_of_the_path_refuses_lacks_that_key():
    keys = RecordKeys(("json:length(items)", "json:sort(tags)", "json:id"))
    assert keys.take(record(None, document(id=7))) == ["7"]
    assert keys.take(record(None, document(id=8, items=[1, 2], tags=["a", 1]))) == ["2", "8"]
    assert keys.take(record(None, document(tags=[1, "a"]))) == []
    assert (keys.without_key, keys.no_json) == (1, 0)


@pytest.mark.parametrize(("path", "keys"), [("ids", ["a", "7", "b"]), ("to_string(ids)", []), ("sort(ids)", [])])
def test_arrays_of_more_levels_than_the_stack_of_python(monkeypatch, path, keys):
    deep = ["7"]
    for _ in range(1_200):
        deep = [deep]
    # the parser of Python 3.11 accepts fewer levels
    monkeypatch.setattr(keys_module, "json_numbers", SimpleNamespace(loads=lambda _: {"ids": ["a", *deep, "b"]}))
    assert RecordKeys((f"json:{path}", "key")).take(record(b"k", b"[]")) == ["k", *keys]


@pytest.mark.parametrize("text", ["keys", "header:", "json:a[", "", "json:items[].lower(id)", "json:length(a, b)"])
def test_what_is_no_key_is_refused(text):
    with pytest.raises(InvalidArgument, match="--key"):
        RecordKeys((text,))
