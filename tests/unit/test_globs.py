"""A glob names the same files in a folder, by a path and by a URI, and in a storage."""

from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from tiered_index import IndexConfig
from tiered_index.connectors.files.globs import Glob
from tiered_index.connectors.files.listing import listed_files
from tiered_index.errors import InvalidArgument

CONFIG = IndexConfig(storage="memory://globs")
NAMES = (
    *("a.x", "b.x", "^.x", "]x", "b-c.x", "é.x", "[ab].y", "st*r.y", "st[a]r.y", "q?s=1.y", "50%.y"),
    *("day/a.x", "day/b.x", "day/deep/a.x", "day2/a.x", "_day=1/a.x", "day/_hour=2/b.x", "_a=b.x"),
    *("out/_temporary/0/a.x", "out/.git/a.x", "out/_a.x", "out/.a.x", "out/a.x", "_out/a.x", "[d]/a.x", "[d]/.git/b.x"),
)
TOP = ["a.x", "b.x", "^.x", "b-c.x", "é.x"]
SEEN = [
    *("day/a.x", "day/b.x", "day/deep/a.x", "day2/a.x", "_day=1/a.x", "day/_hour=2/b.x", "_a=b.x"),
    *("out/a.x", "[d]/a.x"),
]
# The names of a pattern. A path and a URI have the same text, unless it has an escape
PATTERNS = {
    "*.x": [*TOP, "_a=b.x"],
    "?.x": ["a.x", "b.x", "^.x", "é.x"],
    "??x": ["a.x", "b.x", "^.x", "é.x"],
    "[ab].x": ["a.x", "b.x"],
    "[!a].x": ["b.x", "^.x", "é.x"],
    "[^a].x": ["b.x", "^.x", "é.x"],
    "[a^].x": ["a.x", "^.x"],
    "[]]x": ["]x"],
    "[!]a]*.x": ["b.x", "^.x", "b-c.x", "é.x", "_a=b.x"],
    "b[,-.]c.x": ["b-c.x"],
    "b[!-]*": ["b.x"],
    "[a-b].x": ["a.x", "b.x"],
    "[[]ab].y": ["[ab].y"],
    "[ab].y": ["[ab].y"],
    "st[*]r.y": ["st*r.y"],
    "st*r.y": ["st*r.y"],
    "st[[]a]?.y": ["st[a]r.y"],
    "q[?]s*": ["q?s=1.y"],
    "[*": ["[ab].y"],
    "{a,b}*": [],
    "day/*.x": ["day/a.x", "day/b.x"],
    "day*/a.x": ["day/a.x", "day2/a.x"],
    "day?/*": ["day2/a.x"],
    "day[!/]a.x": [],
    "*/a.x": ["day/a.x", "day2/a.x", "_day=1/a.x", "out/a.x", "[d]/a.x"],
    "*/*/a.x": ["day/deep/a.x"],
    "**/*.x": [*TOP, *SEEN],
    "**": [name for name in NAMES if "/" not in name] + [name for name in SEEN if "/" in name],
    "**/**/[a].x": ["a.x", "day/a.x", "day/deep/a.x", "day2/a.x", "_day=1/a.x", "out/a.x", "[d]/a.x"],
    "day/**": ["day/a.x", "day/b.x", "day/deep/a.x", "day/_hour=2/b.x"],
    "day**.x": [],
    "d**/a.x": ["day/a.x", "day2/a.x"],
    "**/deep/**": ["day/deep/a.x"],
    "out/**": ["out/a.x"],
    "out/_*": ["out/_a.x"],
    "out/.*": ["out/.a.x"],
    "out/_temporary/**": ["out/_temporary/0/a.x"],
    "**/_temporary/**": ["out/_temporary/0/a.x"],
    "**/.git/*": ["out/.git/a.x", "[d]/.git/b.x"],
    "out/*/*.x": [],
    "*out/a.x": ["out/a.x"],
    "_*/*.x": ["_day=1/a.x", "_out/a.x"],
    "_out": ["_out/a.x"],
    "out": ["out/a.x"],
    "out/": ["out/a.x"],
    "_out/": ["_out/a.x"],
    "[d]": ["[d]/a.x"],
    "[[]d]/**": ["[d]/a.x"],
}
ESCAPED = {
    "50%25.y": ["50%.y"],
    "5?%25*": ["50%.y"],
    "st%2Ar.y": ["st*r.y"],
    "s*%2A*": ["st*r.y"],
    "st%5Ba%5D?.y": ["st[a]r.y"],
    "q%3F*": ["q?s=1.y"],
    "%C3%A9*": ["é.x"],
    "[%C3%A9a].x": ["é.x", "a.x"],
}


def named(source: str, folder: str, config: IndexConfig = CONFIG) -> list[str]:
    """Return the names of the files of a source below a folder."""
    try:
        with listed_files([source], config) as files:
            return sorted(unquote(file.uri).removeprefix(unquote(folder)) for file in files)
    except InvalidArgument as error:
        assert "no file" in str(error) or "No such file" in str(error), error
        return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (path := tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path / "files"


def test_a_pattern_names_the_same_files_of_a_folder_by_a_path_and_by_a_uri(folder: Path) -> None:
    base = folder.as_uri() + "/"
    for pattern, expected in PATTERNS.items():
        assert named(f"{folder}/{pattern}", base) == sorted(expected), pattern
        assert named(f"{base}{pattern}", base) == sorted(expected), pattern
    for pattern, expected in ESCAPED.items():
        assert named(f"{base}{pattern}", base) == sorted(expected), pattern
    # a path has no escapes
    assert named(f"{folder}/%C3%A9*", base) == []


@pytest.mark.parametrize(("prefix", "client"), [("", ""), ("logs 1%/_raw/", "&client=boto3")])
def test_a_pattern_names_the_same_files_of_a_storage(s3_environment: Any, prefix: str, client: str) -> None:
    bucket = f"s3://{s3_environment.new_bucket()}"
    parameters = f"?endpoint_url={s3_environment.endpoint_url}&addressing_style=path{client}"
    with closing(CONFIG.open_storage(bucket + parameters, any_names=True)) as storage:
        for name in NAMES:
            storage.put(prefix + name, b"x")
    for pattern, expected in (PATTERNS | ESCAPED).items():
        base = f"{bucket}/{quote(prefix)}"
        assert named(f"{base}{pattern}{parameters}", base) == sorted(expected), pattern
    # the parameters of the index's storage
    beside = IndexConfig(storage=f"{bucket}/index{parameters}")
    assert named(f"{base}day?/*", base, beside) == named(f"{base}day2", base, beside) == ["day2/a.x"]


@pytest.mark.parametrize("folder", ["x/", "x"])
def test_a_prefix_names_all_objects_below_it_also_behind_two_slashes(s3_environment: Any, folder: str) -> None:
    bucket = f"s3://{s3_environment.new_bucket()}"
    parameters = f"?endpoint_url={s3_environment.endpoint_url}&addressing_style=path"
    with closing(CONFIG.open_storage(bucket + parameters, any_names=True)) as storage:
        for name in ("x/b", "x//a", "x/c/d", "xy"):
            storage.put(name, b"x")
    assert named(f"{bucket}/{folder}{parameters}", f"{bucket}/x/") == ["/a", "b", "c/d"]


@pytest.mark.parametrize("pattern", ["*", "?\nb", "a[\n]b", "a[!b]b", "**", "a\nb"])
def test_a_newline_is_a_character_of_names(pattern: str) -> None:
    assert Glob.of(pattern).matches("a\nb") and not Glob.of(pattern).matches("a\nb/.a\nc")


def test_a_range_without_a_character_is_an_error_everywhere(folder: Path) -> None:
    for source, pattern in product((f"{folder}", folder.as_uri(), "memory://globs"), ("[z-a].x", "day/[!9-0]*")):
        told = pytest.raises(InvalidArgument, match=r"\[(z-a|!9-0)\] has the range (z-a|9-0), which has no character")
        with told, listed_files([f"{source}/{pattern}"], CONFIG, may_lack=True):
            pass


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.x", "/*/**/a.x"])
def test_links_to_folders_are_followed_and_each_folder_is_read_once(tmp_path: Path, pattern: str) -> None:
    for name in ("files/day/a.x", "elsewhere/deep/a.x"):
        (path := tmp_path / name).parent.mkdir(parents=True)
        path.write_bytes(b"x")
    links = {
        "day/loop": ".",
        "day/up": "..",
        "day/loop2": "../day",
        "a link": "day",
        "to": "../elsewhere",
        "self": "self",
    }
    for name, target in {**links, "z": "to", "gone": "nowhere", "day/b.x": "nowhere.x"}.items():
        (tmp_path / "files" / name).symlink_to(target)
    expected = ["day/a.x", "to/deep/a.x"]
    assert named(f"{tmp_path}/files{pattern}", f"{tmp_path.as_uri()}/files/") == expected
    # a link that the source names
    assert named(f"{tmp_path}/files/to/**", f"{tmp_path.as_uri()}/files/") == ["to/deep/a.x"]
