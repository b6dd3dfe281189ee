"""One index has files of both of RocketMQ's hash rules: `abs` up to its release 5.5.0, `mask` from 5.5.1 on.

The rules give half of the keys different hashes. Lookups find every key, in every state of a file and after a merge.
Keys of two topics may have one hash.
"""

import pytest

from tests.support.merging import BASE_MS, HOUR_MS, RegionItem
from tests.support.pages import items_by_pages
from tests.support.rounds import upload
from tiered_index import IndexReader, Lookup, hash_key
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError
from tiered_index.format.layout import Layout
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.jobs.merge_run import MergeOptions, merge

T = 1_700_000_000_000
KEYS = [f"{number * 0x9E3779B1 % 2**32:08x}-order" for number in range(12)]


@pytest.mark.parametrize("slots", [1, 50])
def test_files_of_both_rules_in_one_index(open_index, storage, clock, slots):
    put = 0

    def fill(index):
        nonlocal put
        for key in KEYS:
            index.put("t", 0, key, put, 10, T + 1000 * put)
            put += 1

    def check(opened):
        expected = [[(at, hash_key("t", key)) for at in range(n, put, len(KEYS))][::-1] for n, key in enumerate(KEYS)]
        assert [[(i.offset, i.key_hash) for i in opened.query("t", key)] for key in KEYS] == expected
        many = opened.query_many([Lookup(topic="t", key=key) for key in KEYS])
        assert [[(i.offset, i.key_hash) for i in answer] for answer in many] == expected
        for key, offsets in zip(KEYS, expected, strict=True):
            items = items_by_pages(opened.query, "t", key, max_count=1)
            assert [(item.offset, item.key_hash) for item in items] == offsets

    def reader():
        return IndexReader.open(root=index.config.root, storage_backend=storage, clock=clock)

    settings = {"preset": "rocketmq", "slots": slots, "items": 200, "local_keep_s": 0}
    rules = ["abs", "mask", "abs", None, "mask"]
    for number, rule in enumerate(rules):
        index = open_index("root", hash=rule, **settings)
        check(index)
        fill(index)
        check(index)  # from the buffer
        index.flush()
        check(index)
        with reader() as read:
            check(read)
        if number % 2:  # otherwise the next index continues the file, or seals it if its rule is the other one
            upload(index)
            check(index)
            index.run_lifecycle()
        check(index)
        index.close()
    index = open_index("root", **settings)
    upload(index, rounds=2)
    assert {handle.hash for handle in index.files()} == {"abs", "mask"}
    assert {handle.place for handle in index.files()} == {"storage"}
    check(index)
    clock.advance(7 * 86400)
    log = index._session.log
    files = len(index.files())
    assert merge(storage, log, clock, MergeOptions()).sources == files
    assert {stored.hash for stored in log.state.objects.values()} == {"both"}
    clock.advance(60)
    index.run_lifecycle()
    check(index)
    with reader() as read:
        check(read)


def test_which_rule_new_files_have(open_index, storage):
    """A new index has the rule of RocketMQ's newest release.

    An existing index keeps its rule until `hash` changes it.
    """
    assert IndexConfig(preset="rocketmq").geometry().hash == "mask"
    assert "hash" not in IndexConfig(preset="rocketmq", hash="abs").geometry().to_json()
    layout = IndexConfig(preset="rocketmq").geometry()
    assert Layout.from_json(layout.to_json()) == layout and layout.to_json()["hash"] == "mask"
    index = open_index("root", preset="rocketmq", hash="abs")
    index.close()
    assert open_index("root")._rule == "abs"
    with pytest.raises(ConfigError, match="hash = mask is for preset rocketmq: set that, too, since native has abs"):
        open_index("other", hash="mask")


def is_packed(life, name):
    """Return whether an object is packed."""
    data = life.storage.get(name)
    return parse_trailer(data, name, len(data)).metadata.packing is not None


@pytest.mark.parametrize(
    ("preset", "keep_s", "item_type"), [("rocketmq", 0, None), ("rocketmq", 10**9, None), ("native", 0, RegionItem)]
)
def test_only_files_of_preset_rocketmq_are_plain_and_a_merge_packs_them(merging, preset, keep_s, item_type):
    life = merging(preset=preset, settings={"slots": 50, "local_keep_s": keep_s}, item_type=item_type)
    for number in range(3):
        life.put((BASE_MS + number * HOUR_MS + row * 1000, f"k{row % 9}") for row in range(60))
        life.publish()
        life.check(life.index)
    assert [is_packed(life, stored.name) for stored in life.state.files.values()] == [preset == "native"] * 3
    life.check()
    life.later()
    life.merge()
    assert not life.state.files and all(is_packed(life, name) for name in life.state.objects)
    life.check()
