"""One encoder writes all results as JSON. Stored JSON documents are read as their declared types."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from msgspec import Struct

from tiered_index.base.documents import Count, FileId, decoded
from tiered_index.base.encoding import json_line, json_text, show_bytes
from tiered_index.errors import CorruptFile
from tiered_index.server.http import wire
from tiered_index.service.jobs.verify_report import Defect
from tiered_index.types import Freshness, LostFile


def test_commands_and_service_encode_results_alike():
    lost = LostFile(file="f", begin_ms=0, end_ms=1, entries=2)
    fresh = Freshness(source="s", as_of_ms=None, positions={})
    for topic in ("orders", "caf\u00e9", "\ud800", "\x7f"):
        document = {"topic": topic, "lost": (lost,), "fresh": fresh, "found": [Defect("f", "part", "problem")]}
        texts = json_text(document), wire.encode(document).decode()
        assert json.loads(texts[0]) == json.loads(texts[1])
        assert all(text.rstrip("\n").isprintable() and text.isascii() for text in texts)
    # as `to_dict` says, fields with `None` are left out
    assert json.loads(texts[0])["fresh"] == {"source": "s", "as_of_ms": None, "positions": {}}
    assert json.loads(json_text({"path": Path("a"), "bytes": b"\x01"})) == {"path": "a", "bytes": "01"}
    # numbers that JSON lacks are null
    document = {"items": [{"share": float("nan")}, {"share": 1.5}], "most": float("-inf"), "topic": "\ud800"}
    for text in (json_text(document), json_text(document, 2), wire.encode(document).decode()):
        assert json.loads(text) == {"items": [{"share": None}, {"share": 1.5}], "most": None, "topic": "\ud800"}
    assert json_text([float("nan")], allow_nan=True) == "[NaN]"
    with pytest.raises(TypeError, match="object has no form in JSON"):
        json_text({"x": object()})


@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a": ', b"}")])
def test_a_body_of_too_many_levels_for_an_encoder_is_text(begin, end):
    flat = b"[" + b"[], " * 500 + b"0]"
    for levels, form in ((500, "json"), (501, "text")):
        data = begin * (levels - 1) + b"[]" + end * (levels - 1)
        shown = show_bytes(data, "json")
        assert shown["body_format"] == form
        assert all(json_text(shown, indent) for indent in (None, 2)) and wire.encode(shown)
    assert show_bytes(flat, "json")["body_format"] == "json"


class Part(Struct):
    id: FileId
    count: Count
    kind: Literal["one", "two"] = "one"


class Whole(Struct):
    parts: tuple[Part, ...]
    names: dict[str, Count] = {}


def read(document: object) -> Whole:
    return decoded(json.dumps(document).encode(), Whole, "file", "list")


def test_unknown_members_are_ignored_and_lone_surrogates_are_refused():
    stored = {"parts": [{"id": "a", "count": 2**63 - 1, "later": [1]}], "names": {"中😀": 2}, "more": None}
    assert read(stored) == Whole((Part("a", 2**63 - 1),), {"中😀": 2})
    with pytest.raises(CorruptFile, match=r"^file: list is invalid"):
        read(stored | {"names": {"\ud800": 1}})


@pytest.mark.parametrize("count", [True, 1.0, "1", 2**63, -1, None])
def test_a_wrong_member_is_named_by_its_path_and_not_quoted(count):
    for part in ({"count": count}, {"id": "a\n"}, {"id": ""}, {"kind": "se`cret - at `$.x"}):
        stored = {"parts": [{"id": "a", "count": 1}, {"id": "b", "count": 1, **part}], "names": {"x": 1}}
        problem = rf"^file: list is invalid: .*`\$\.parts\[1\]\.{next(iter(part))}`"
        with pytest.raises(CorruptFile, match=problem) as caught:
            read(stored)
        assert "cret" not in str(caught.value)


DEEP = b'{"x":' + b"[" * 10**5


@pytest.mark.parametrize("data", [b"", b"{", b"{} {}", b'{"parts": \xff}', DEEP, DEEP + b"]" * 10**5 + b"}"])
def test_bytes_that_are_no_document(data):
    with pytest.raises(CorruptFile, match=r"^file: list is (not a valid document|invalid)"):
        decoded(data, Whole, "file", "list")


_BESIDE = """
import sys, threading
from typing import Annotated
from msgspec import Meta, Struct
from tiered_index.base.documents import decoded

def read():
    read.values.append(decoded(b'{"part": {"count": 1}}', Whole, "file", "list").part.count)
read.values = []
other = threading.Thread(target=read)

def beside():
    other.start()
    other.join(0.2)
    return Meta(ge=0)

class Part(Struct):
    count: "Annotated[int, beside()]"

class Whole(Struct):
    part: Part

read()
other.join()
assert read.values == [1, 1]
"""


def test_a_thread_waits_for_a_class_that_msgspec_learns_for_another_thread():
    """Its process crashed."""
    assert subprocess.run([sys.executable, "-c", _BESIDE], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{\n  "a": [1.50, -0,\t1e400]\r\n}\n', '{   "a": [1.50, -0, 1e400]  }'),
        ('"\u00e4 \U0001f600 \x7f"', r'"\u00e4 \ud83d\ude00 \u007f"'),
        (" 4711 ", "4711"),
        # no JSON
        ("a b", '"a b"'),
        ("", '""'),
        ("[1, NaN]", '"[1, NaN]"'),
        ('"a\nb"', r'"\"a\nb\""'),
        ("{} {}", '"{} {}"'),
        ("\ufeff{}", r'"\ufeff{}"'),
        ("[" * 100_000, f'"{"[" * 100_000}"'),
    ],
)
def test_a_line_of_json_has_a_document_as_it_is_written_or_a_text(text, line):
    assert json_line(text) == line
