"""Bytes have one form as a key. Another form of a key that nothing has may be the one that was meant."""

import pytest

from tiered_index.format.keys.spelling import key_text, similar_keys
from tiered_index.service.read.answers.rows import check_key
from tiered_index.types import MAX_KEY_UNITS

FORMS = {b"order-1": "order-1", "bestellung-ä".encode(): "bestellung-ä", b"\0\0\0\0\0\0\0*": "0x000000000000002a"}
FORMS |= {b"a\tb": "0x610962", b"a\x7f": "0x617f", b"\xff": "0xff", b"0x2a": "0x2a", b"0X2A": "0X2A"}
FORMS["\x80\u2028".encode()] = "\x80\u2028"


def test_a_byte_string_has_one_form():
    assert {data: key_text(data) for data in FORMS} == FORMS


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("order", "0x6f72646572"),
        ("0x6f72646572", "order"),
        ("a\tb", "0x610962"),
        ("0x610962", "a\tb"),
        ("0xFF", "0xff"),
        ("0xff", "\ufffd"),
        ("user=0x6f72646572", "user=order"),
        ("user=order", "user=0x6f72646572"),
    ],
)
def test_the_text_of_digits_and_the_digits_of_text_are_among_many_names(key, other):
    names = [f"name{number}=" for number in range(100)]
    assert other in similar_keys(key) and (key == "0xFF" or other in similar_keys(key, names))


@pytest.mark.parametrize(
    ("uuid", "other"),
    [
        ("00010203-0405-0607-0809-0a0b0c0d0e0f", "0x000102030405060708090a0b0c0d0e0f"),
        ("4dc3bc6c-6c65-722d-5374-7261c39f6531", "Müller-Straße1"),
    ],
)
def test_a_uuid_and_the_key_of_its_bytes_are_similar(uuid, other):
    assert other in similar_keys(uuid)
    assert not other.startswith("0x") or uuid in similar_keys(other)


@pytest.mark.parametrize("key", ["k", "0xab", "ab", "7", "ß", "\U0001f511", "k=0x00"])
def test_what_is_similar_to_a_long_key_is_a_valid_key(key):
    for long in (key * (MAX_KEY_UNITS // len(key.encode("utf-16-le")) * 2), "0x" + "ab" * (MAX_KEY_UNITS // 2 - 1)):
        check_key(long)
        for similar in similar_keys(long, ["name=" * 7_000]):
            check_key(similar)
