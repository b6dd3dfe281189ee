"""Properties, keys, tags code and text, as the broker's Java code reads them."""

from __future__ import annotations

import pytest

from tiered_index.rocketmq.log.layout import index_keys, java_text, parse_properties


@pytest.mark.parametrize(
    ("stored", "utf16"),
    [  # the results of `new String(bytes, UTF_8)` of OpenJDK 17
        ("c3a9", "00e9"),
        ("f09f9a80", "d83dde80"),
        ("eda080", "fffd"),
        ("eda0c0edc3", "fffdfffdfffdfffd"),
        ("edb8f4f041e0e0", "fffdfffdfffd0041fffdfffd"),
        ("edbff480", "fffdfffd"),
        ("c09ff0f4eda0", "fffdfffdfffdfffdfffd"),
        ("edbf41a0", "fffd0041fffd"),
        ("f0edb8c39f80edc3", "fffdfffd00dffffdfffdfffd"),
        ("ffe48041edb8f0", "fffdfffd0041fffdfffd"),
    ],
)
def test_text_equals_java(stored, utf16):
    assert java_text(bytes.fromhex(stored)) == bytes.fromhex(utf16).decode("utf-16-be")


@pytest.mark.parametrize(
    ("text", "properties"),
    [
        ("", {}),
        ("no separators at all", {}),
        ("KEYS\x01a b", {"KEYS": "a b"}),  # older clients leave out the last separator
        ("KEYS\x01a\x02TAGS\x01t\x02", {"KEYS": "a", "TAGS": "t"}),
        ("KEYS\x01\x02TAGS\x01t\x02", {"TAGS": "t"}),
        ("\x01value\x02name\x02\x02\x01\x02a\x01b\x02", {"a": "b"}),
        ("a\x01b\x01c\x02", {"a": "b\x01c"}),
        ("a\x01first\x02b\x01x\x02a\x01last\x02a\x01\x02", {"a": "last", "b": "x"}),
        ("name only\x02a\x01b", {"a": "b"}),
    ],
)
def test_properties(text, properties):
    assert parse_properties(text) == properties


@pytest.mark.parametrize(
    ("properties", "keys"),
    [
        ({}, ()),
        ({"KEYS": "a b a"}, ("a", "b")),
        ({"KEYS": "  a   b ", "UNIQ_KEY": "u"}, ("u", "a", "b")),
        ({"KEYS": "u x", "UNIQ_KEY": "u"}, ("u", "x")),
        ({"KEYS": "  "}, ()),
        ({"KEYS": "a\tb\u00a0c"}, ("a\tb\u00a0c",)),
    ],
)
def test_keys(properties, keys):
    assert index_keys(properties) == keys
