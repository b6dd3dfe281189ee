"""The codec of RocketMQ's remoting protocol: golden frames, round trips of any command, and invalid bytes."""

import base64
import gzip
import json
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_index.connectors.rocketmq.remoting.frames import (
    BINARY,
    JSON,
    AccessKey,
    Command,
    decode_frame,
    encode_frame,
    signature,
    signer_of,
)
from tiered_index.errors import InvalidArgument

DATA = Path(__file__).parents[1] / "golden" / "data" / "remoting" / "frames.jsonl.gz"


@cache
def frames() -> dict[str, dict[str, Any]]:
    """Return the frames by file; `frame` is the bytes, including the length."""
    lines = [json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines()]
    return {line["file"]: line | {"frame": base64.b64decode(line["frame"])} for line in lines}


def requests() -> list[str]:
    return [name for name, frame in frames().items() if frame["direction"] == "request"]


def responses() -> list[str]:
    return [name for name, frame in frames().items() if frame["direction"] == "response"]


SECRET = "0123456789abcdef"
KEYS = {"archiveReader": AccessKey(SECRET)}
_I32 = st.integers(-(2**31), 2**31 - 1)
# every code point except surrogates has UTF-8
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


def test_every_golden_frame_is_understood():
    for file, golden in frames().items():
        command = decode_frame(golden["frame"][4:])
        header = {name: getattr(command, name) for name in ("code", "opaque", "flag", "version", "remark")}
        assert header | {"extFields": command.fields} == golden["header"], file
        assert command.language == "JAVA"
        assert command.serialisation == (JSON if golden["serialisation"] == "JSON" else BINARY)
        assert command.is_response == (golden["direction"] == "response")
        assert not command.is_oneway


def test_golden_frames_are_written_byte_for_byte():
    # not JSON requests: their fields are in the order of Java's HashMap, which has no meaning
    binary = [n for n in requests() if frames()[n]["serialisation"] != "JSON"]
    assert (len(responses()), len(binary)) == (74, 28)
    for name in responses() + binary:
        frame = frames()[name]["frame"]
        assert encode_frame(decode_frame(frame[4:])) == frame, name


def test_golden_signatures():
    signed = 0
    for name in requests():
        command = decode_frame(frames()[name]["frame"][4:])
        if "Signature" not in command.fields:
            assert signer_of(command, KEYS) is None
            continue
        signed += 1
        assert signer_of(command, KEYS) is KEYS["archiveReader"], name
        for others in ({"archiveReader": AccessKey("another")}, {"another": AccessKey(SECRET)}, {}):
            assert signer_of(command, others) is None
        assert signer_of(replace(command, body=command.body + b" "), KEYS) is None
        for field in command.fields.keys() - {"AccessKey"}:
            changed = {**command.fields, field: command.fields[field] + "0"}
            assert signer_of(replace(command, fields=changed), KEYS) is None, (name, field)
    assert signed == 20


def test_clients_up_to_4_9_3_do_not_sign_the_kind_of_key():
    old = Command(code=12, version=399, fields={"AccessKey": "archiveReader", "key": "k"})
    signed = {**old.fields, "Signature": signature(old, SECRET), "_UNIQUE_KEY_QUERY": "true"}
    assert signer_of(replace(old, fields=signed), KEYS) is not None
    assert signer_of(replace(old, fields=signed, version=401), KEYS) is None


def test_a_request_without_an_access_key_has_no_signer():
    command = Command(code=12, fields={"key": "k"})
    signed = replace(command, fields={**command.fields, "Signature": signature(command, "")})
    assert signer_of(signed, KEYS) is None
    assert SECRET not in repr(KEYS)


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Command,
        code=st.integers(-(2**15), 2**15 - 1),
        opaque=_I32,
        flag=_I32,
        language=st.sampled_from(["JAVA", "CPP", "PYTHON", "GO", "RUST", "NODE_JS", "OTHER"]),
        version=st.integers(-(2**15), 2**15 - 1),
        remark=st.none() | _TEXTS,
        fields=st.dictionaries(_TEXTS, _TEXTS, max_size=6),
        body=st.binary(max_size=100),
        serialisation=st.sampled_from([JSON, BINARY]),
    )
)
def test_a_command_decodes_to_itself(command):
    frame = encode_frame(command)
    assert struct.unpack_from(">i", frame) == (len(frame) - 4,)
    assert decode_frame(frame[4:]) == command


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_invalid_bytes_are_only_refused(data):
    golden = frames()[data.draw(st.sampled_from(requests()))]["frame"][4:]
    frame = bytearray(golden[: data.draw(st.integers(0, len(golden)))])
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4)):
        if frame:
            frame[place % len(frame)] = value
    try:
        command = decode_frame(bytes(frame))
    except InvalidArgument:
        return
    # the codec can encode every command that it decoded, unless its code is one of JSON's
    if -(2**15) <= command.code < 2**15 and -(2**15) <= command.version < 2**15:
        assert decode_frame(encode_frame(command)[4:]).fields == command.fields


def _json(**header):
    text = json.dumps(header).encode()
    return struct.pack(">I", len(text)) + text


def test_numbers_and_truths_among_the_fields_are_texts():
    command = decode_frame(_json(code="12", extFields={"a": 1, "b": True, "c": None, "d": "", "e": 2**63 - 1}))
    assert (command.code, command.opaque, command.language) == (12, 0, "OTHER")
    assert command.fields == {"a": "1", "b": "true", "e": "9223372036854775807"}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\x05{}",
        b"\x01\0\0\0",
        b"\0\0\0\x02[]",
        b"\0\0\0\x7f" + _json(code=12)[4:],
        b"\0\0\0\x02{}",
        b"\0\0\x03\xe8" + b"[" * 1000,
        _json(code=2**31),
        _json(code=1.5),
        _json(code="12x"),
        _json(code=12, extFields=[1]),
        _json(code=12, extFields={"topic": ["x"]}),
        _json(code=12, remark={}),
        _json(code=12, extFields={str(number): "x" for number in range(257)}),
        encode_frame(Command(code=12, fields={str(number): "x" for number in range(257)}, serialisation=BINARY))[4:],
        # a remark, a field's name and a field's value that are longer than their header, and a negative length
        b"\x01\0\0\x11" + bytes(13) + b"\0\0\0\x01",
        b"\x01\0\0\x17" + bytes(17) + b"\0\0\0\x02\0\x09",
        b"\x01\0\0\x1d" + bytes(17) + b"\0\0\0\x08\0\x01t\x7f\xff\xff\xffx",
        b"\x01\0\0\x15" + bytes(13) + b"\xff\xff\xff\xff\0\0\0\0",
    ],
)
def test_invalid_frames_are_refused(frame):
    with pytest.raises(InvalidArgument):
        decode_frame(frame)


def test_values_too_large_for_a_frame_are_refused():
    for command in (
        Command(code=2**15, serialisation=BINARY),
        Command(code=1, fields={"n" * 2**15: "v"}, serialisation=BINARY),
        Command(code=1, remark="r" * 2**24),
    ):
        with pytest.raises(InvalidArgument):
            encode_frame(command)


def test_invalid_utf_8_of_a_json_header_is_replaced():
    frame = _json(code=12, extFields={"topic": "t?"}).replace(b"?", b"\xff")
    assert decode_frame(frame).fields == {"topic": "t\ufffd"}
