"""A layered mapping and its copies are dicts with their own changes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_index.service.log import layered as layered_module
from tiered_index.service.log.layered import Layered, layered

KEYS = st.integers(0, 12).map(str)
STEPS = st.lists(st.tuples(st.sampled_from(["set", "pop", "copy", "freeze"]), KEYS, st.integers(0, 99)), max_size=60)


def check(found, expected):
    assert dict(found) == expected == dict(found.items())
    assert list(found) == list(expected) == list(found.keys())
    assert list(found.values()) == list(expected.values())
    assert list(reversed(found.values())) == list(reversed(expected.values()))
    assert len(found) == len(expected)
    assert found == expected and expected == found
    for number in range(13):
        assert (str(number) in found) is (str(number) in expected)
        assert found.get(str(number)) == expected.get(str(number))


@settings(max_examples=300)
@given(st.dictionaries(KEYS, st.integers(0, 99)), STEPS, st.sampled_from([0, 3, 256]))
def test_each_copy_is_a_dict_of_its_own(entries, steps, fewest):
    before = layered_module._FEWEST
    layered_module._FEWEST = fewest
    try:
        begun = dict(entries)
        now, model, kept = layered(entries), dict(entries), []
        for step, key, value in steps:
            if step == "set":
                # a replaced entry moves to the end
                model.pop(key, None)
                now[key] = model[key] = value
            elif step == "pop":
                assert now.pop(key, None) == model.pop(key, None)
            else:
                kept.append((now, dict(model)))
                now = layered(now)
            check(now, model)
        for one, expected in kept:
            check(one, expected)
        assert entries == begun
    finally:
        layered_module._FEWEST = before


def test_a_copy_shares_the_entries_until_there_are_many_changes():
    entries = {str(number): number for number in range(100_000)}
    now, shared = layered(entries), 0
    for number in range(2_000):
        now = layered(now)
        now[f"new {number}"] = number
        shared += now._entries is entries
        assert len(now._added) <= 2 * 320
    assert 600 <= shared < 2_000
    assert isinstance(now, Layered) and len(now) == 102_000
