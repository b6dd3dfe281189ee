"""Stored JSON documents are read as their declared types."""

import json
import subprocess
import sys
from typing import Literal

import pytest
from msgspec import Struct

from tiered_index.errors import CorruptFile
from tiered_index.stored import Count, FileId, decoded


class Part(Struct):
    id: FileId
    count: Count
    kind: Literal["one", "two"] = "one"


class Whole(Struct):
    parts: tuple[Part, ...]
    names: dict[str, Count] = {}


def read(document: object) -> Whole:
    return decoded(json.dumps(document).encode(), Whole, "file", "list")


def test_unknown_members_are_ignored_and_lone_surrogates_are_read():
    stored = {"parts": [{"id": "a", "count": 2**63 - 1, "later": [1]}], "names": {"\ud800": 1, "中😀": 2}, "more": None}
    assert read(stored) == Whole((Part("a", 2**63 - 1),), {"\ud800": 1, "中😀": 2})


@pytest.mark.parametrize(
    "part",
    [
        {"count": True},
        {"count": 1.0},
        {"count": "1"},
        {"count": 2**63},
        {"count": -1},
        {"count": None},
        {"id": "a\n"},
        {"id": ""},
        {"kind": "se`cret - at `$.x"},
    ],
)
@pytest.mark.parametrize("names", [{}, {"\ud800": 1}])
def test_a_wrong_member_is_named_by_its_path_and_not_quoted(part, names):
    stored = {"parts": [{"id": "a", "count": 1}, {"id": "b", "count": 1, **part}], "names": names}
    with pytest.raises(CorruptFile, match=rf"^file: list is invalid: .*`\$\.parts\[1\]\.{next(iter(part))}`") as caught:
        read(stored)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{} {}",
        b'{"parts": \xff}',
        b'{"parts":' + b"[" * 10**5,
        b'{"x":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    ],
)
def test_bytes_that_are_no_document(data):
    with pytest.raises(CorruptFile, match=r"^file: list is (not a valid document|invalid)"):
        decoded(data, Whole, "file", "list")


_BESIDE = """
import sys, threading
from typing import Annotated
from msgspec import Meta, Struct
from tiered_index.stored import decoded

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
