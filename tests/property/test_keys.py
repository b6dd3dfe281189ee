"""A key has one form: keys with different forms never answer for each other, and the erasure of one hides no other."""

import tempfile

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.server.conftest import serving
from tests.support.rounds import upload
from tiered_index import IndexReader, IndexService, erase
from tiered_index.format.keys.spelling import key_text, similar_keys

T_MS = 1_700_000_000_000
TEXTS = st.text(min_size=1, max_size=6).map(str.encode)
# bytes of a record's key, such as a serialized number
DATA = st.lists(st.binary(min_size=1, max_size=8) | TEXTS, min_size=1, max_size=3, unique=True)


def forms_of(data: list[bytes]) -> list[str]:
    """Return the keys that sources make of bytes and of their texts, and all keys that resemble these."""
    made = [text for each in data for text in (key_text(each), each.decode(errors="replace"), each.hex())]
    return list(dict.fromkeys(key for text in made for key in (text, f"0x{text.encode().hex()}", *similar_keys(text))))


def found(index, keys):
    """Return the offsets that each key finds, which are the same by one call for all keys."""
    alone = [[item.offset for item in index.query("t", key)] for key in keys]
    together = index.query_many([("t", key) for key in keys])
    assert [[item.offset for item in answer] for answer in together] == alone
    return alone


def found_by_http(index, keys):
    with serving(index) as client:
        body = {"lookups": [{"topic": "t", "key": key} for key in keys]}
        answers = client.post("/v1/query:batch", json=body).json()["results"]
        alone = client.get("/v1/query", params=body["lookups"][0]).json()
    assert alone["items"] == answers[0]["items"]
    return [[item["offset"] for item in answer["items"]] for answer in answers]


@settings(max_examples=15)
@example(data=[b"order"])
@example(data=[b"\xff\0", b"a\tb"])
@given(data=DATA)
def test_a_key_finds_and_erases_only_its_entries(data):
    keys = forms_of(data)
    # no entry has every second one
    expected = [[] if number % 2 else [number] for number in range(len(keys))]
    with tempfile.TemporaryDirectory() as folder:
        uri, geometry = f"file://{folder}/storage", {"slots": 7, "items": 500, "background": False}
        with IndexService.open(root=f"{folder}/root", storage=uri, **geometry) as index:
            for key, offsets in zip(keys, expected, strict=True):
                for offset in offsets:
                    index.put("t", 0, key, offset, 1, T_MS)
            assert found(index, keys) == expected
            index.flush()
            assert found(index, keys) == expected
            upload(index, rounds=2)
            assert found(index, keys) == found_by_http(index, keys) == expected
        for number in range(min(2, len(keys))):
            certificate = erase(uri, "t", keys=keys[number], yes=True)
            assert (certificate.matched, len(certificate.tombstones)) == (len(expected[number]), 1)
            expected[number] = []
            with IndexReader.open(uri) as reader:
                assert found(reader, keys) == found_by_http(reader, keys) == expected


@given(data=st.lists(st.binary(min_size=1, max_size=8) | TEXTS, min_size=2, max_size=2, unique=True))
def test_bytes_are_their_text_or_digits_and_share_a_key_only_with_the_text_of_the_digits(data):
    for each in data:
        key = key_text(each)
        assert each == (bytes.fromhex(key[2:]) if key.encode() != each else key.encode())
    first, second = data
    if (key := key_text(first)) == key_text(second):
        assert key.encode() in data
