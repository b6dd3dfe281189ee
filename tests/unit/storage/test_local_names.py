"""Names become paths and back. A walk has the order of names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_index.storage.local.files import CHUNK, decode, encode, walk

SEGMENT = st.text("a.-0", min_size=1, max_size=4).flatmap(
    lambda text: st.sampled_from(
        [text, "x" * (CHUNK - 1) + text, "x" * CHUNK + text, "x" * 2 * CHUNK + text, "x" * CHUNK]
    )
)
NAMES = st.lists(SEGMENT.filter(lambda s: s not in {".", ".."}), min_size=1, max_size=3).map("/".join)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("log/00000000000000000007", "log%/00000000000000000007"),
        ("a", "a"),
        ("a/b", "a%/b"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 200 + "%%/%x"),
        ("x" * 200 + "..", "x" * 200 + "%%/%.."),
        ("x" * 201 + "/y", "x" * 200 + "%%/%x%/y"),
        ("x" * 401, "x" * 200 + "%%/%" + "x" * 200 + "%%/%x"),
    ],
)
def test_encoding(name: str, path: str) -> None:
    assert encode(name) == Path(path)


@given(NAMES)
def test_every_piece_decodes_to_its_part_of_the_name(name: str) -> None:
    pieces = encode(name).parts
    text, in_chunk = "", False
    for index, piece in enumerate(pieces):
        assert len(piece) <= 255
        assert piece not in {".", ".."}
        is_folder = index < len(pieces) - 1
        decoded = decode(piece, is_folder=is_folder, in_chunk=in_chunk)
        assert decoded is not None
        kind, part = decoded
        assert (kind == "object") == (not is_folder)
        text += part + ("/" if kind == "folder" else "")
        in_chunk = kind == "chunk"
    assert text == name


@pytest.mark.parametrize(
    ("entry", "is_folder", "in_chunk"),
    [
        *((folder, True, False) for folder in ("plain", ".%work", ".%uploads", "%", ".%", "..%", "short%%")),
        *((file, False, False) for file in ("file%", "a b", "é", "x" * 201)),
        *((in_chunk, False, True) for in_chunk in ("unmarked", "%")),
    ],
)
def test_foreign_names_do_not_decode(entry: str, is_folder: bool, in_chunk: bool) -> None:
    assert decode(entry, is_folder=is_folder, in_chunk=in_chunk) is None


@given(st.sets(NAMES, max_size=12), st.one_of(st.just(""), NAMES), st.one_of(st.just(""), NAMES))
def test_a_walk_is_in_order_of_whole_names(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], prefix: str, start_after: str
) -> None:
    root = tmp_path_factory.mktemp("walk")
    for name in names:
        path = root / encode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    for some_prefix in (prefix, prefix[:1], prefix[: CHUNK + 1]):
        expected = sorted(name for name in names if name.startswith(some_prefix) and name > start_after)
        assert [info.name for info in walk(root, some_prefix, start_after)] == expected
