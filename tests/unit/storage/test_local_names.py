"""Names become paths and back. A walk has the order of names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_index.storage.local.files import encode, walk

SEGMENT = st.text("a.-0", min_size=1, max_size=4).flatmap(lambda text: st.sampled_from([text, "x" * 196 + text]))
NAMES = st.lists(SEGMENT.filter(lambda s: s not in {".", ".."}), min_size=1, max_size=3).map("/".join)


@pytest.mark.parametrize(
    ("name", "path"), [("log/00000000000000000007", "log%/00000000000000000007"), ("a", "a"), ("a/b/c", "a%/b%/c")]
)
def test_encoding(name: str, path: str) -> None:
    assert encode(name) == Path(path)


@pytest.mark.parametrize(
    "entry", ["plain/", ".%work/", "%/", ".%/", "..%/", "short%%/", "file%", "a b", "é", "x" * 201]
)
def test_foreign_names_are_not_listed(tmp_path: Path, entry: str) -> None:
    """Those that end with a slash are folders."""
    path = tmp_path / entry / "file" if entry.endswith("/") else tmp_path / entry
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert list(walk(tmp_path, "", "")) == []


@given(st.sets(NAMES, max_size=12), st.one_of(st.just(""), NAMES), st.one_of(st.just(""), NAMES))
def test_a_walk_is_in_order_of_whole_names(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], prefix: str, start_after: str
) -> None:
    root = tmp_path_factory.mktemp("walk")
    for name in names:
        path = root / encode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    for some_prefix in (prefix, prefix[:1], prefix[:201]):
        expected = sorted(name for name in names if name.startswith(some_prefix) and name > start_after)
        assert [info.name for info in walk(root, some_prefix, start_after)] == expected
