"""Names become paths and back. A walk has the order of names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_index.storage.local import encode, walk

SEGMENT = st.text("a.-0", min_size=1, max_size=4).flatmap(lambda text: st.sampled_from([text, "x" * 196 + text]))
NAMES = st.lists(SEGMENT.filter(lambda s: s not in {".", ".."}), min_size=1, max_size=3).map("/".join)


def test_names_become_paths_and_foreign_names_are_not_listed(tmp_path: Path) -> None:
    for name, path in (("log/00000000000000000007", "log%/00000000000000000007"), ("a", "a"), ("a/b/c", "a%/b%/c")):
        assert encode(name) == Path(path)
    # those that end with a slash are folders
    for entry in ("plain/", ".%work/", "%/", ".%/", "..%/", "short%%/", "file%", "a b", "é", "x" * 201):
        place = tmp_path / entry / "file" if entry.endswith("/") else tmp_path / entry
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        assert list(walk(tmp_path, "", "")) == [], entry


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
