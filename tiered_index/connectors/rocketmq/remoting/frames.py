"""Encodes and decodes frames of RocketMQ's remoting protocol; checks fields and signatures of requests.

Pure; threads: any.

```
i32 length of what follows | u8 serialisation | u24 length of the header | header | body
```

Numbers are big-endian. Serialisation 0 is a JSON object: `code`, `flag`, `language`, `opaque`, `remark`, `version`, and
`extFields`, an object of texts. Serialisation 1 is binary:

```
i16 code | u8 language | i16 version | i32 opaque | i32 flag | i32 length, remark
i32 length of all fields, each: i16 length, name, i32 length, value
```

It follows RocketMQ's `RemotingCommand`, `RemotingSerializable` and `RocketMQSerializable`. As there, an empty text
equals a missing one, and invalid UTF-8 becomes U+FFFD. Unlike there, a length that exceeds its frame is an error before
memory of that length is allocated.

A signature (`AclClientRPCHook`, `AclSigner`) covers the fields' values in the order of their names, then the body.
Code, opaque and time are not signed, so an eavesdropper can repeat a request: use TLS across an untrusted network.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from tiered_index.errors import InvalidArgument
from tiered_index.service.read.answers.rows import check_topic

JSON, BINARY = 0, 1
# Bits of `flag`.
RESPONSE, ONEWAY = 1, 2
# Java clients close the connection at a longer frame.
MAX_FRAME_BYTES = 16_777_216
# Ten times those of a client's request: to sort thousands, for the signature, takes longer than a lookup
MOST_FIELDS = 256
# The protocol version of responses: 5.3.3
VERSION = 479

_HEAD_BYTES = 4
_binary_head = struct.Struct(">hBhii")
_LANGUAGES = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST"),
    "NODE_JS",
)
_OTHER = "OTHER"


class RequestCode(IntEnum):
    """RocketMQ's numbers of the requests that the service answers."""

    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    GET_ALL_TOPIC_CONFIG = 21
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    GET_CONSUMER_LIST_BY_GROUP = 38
    GET_KV_CONFIG = 101
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    GET_CONSUME_STATS = 208
    GET_TOPICS_BY_CLUSTER = 224
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    GET_NAMESRV_CONFIG = 319
    GET_TOPIC_CONFIG = 351
    LITE_PULL_MESSAGE = 361


_NAMES: dict[int, str] = {code.value: code.name for code in RequestCode}


def name_of(code: int) -> str:
    """Return the name of a request code, or ``other``."""
    return _NAMES.get(code, "other")


class ResponseCode(IntEnum):
    """The outcomes of a request: RocketMQ's numbers."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    INVALID_PARAMETER = 29
    CONSUMER_NOT_ONLINE = 206


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One frame: a request, or the response with the same `opaque`.

    `code` is signed 16 bits in a binary header and 32 in JSON. `fields` are RocketMQ's `extFields`: numbers in decimal,
    truths as ``true`` and ``false``. `serialisation` is the header's, `JSON` or `BINARY`.
    """

    code: int
    opaque: int = 0
    flag: int = 0
    language: str = "JAVA"
    version: int = VERSION
    remark: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    serialisation: int = JSON
    withheld: int = field(default=0, compare=False)
    """In a response: number of places that were withheld because of their topic. It is not part of the frame."""

    @property
    def is_response(self) -> bool:
        """Whether the command is a response."""
        return bool(self.flag & RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether the client expects no response."""
        return bool(self.flag & ONEWAY)

    def answered(
        self, code: int, remark: str | None = None, *, fields: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Command:
        """Return the response to this request, in its serialisation."""
        return Command(
            code=code,
            opaque=self.opaque,
            flag=RESPONSE,
            remark=remark,
            fields=fields or {},
            body=body,
            serialisation=self.serialisation,
        )


def encode_frame(command: Command) -> bytes:
    """Return a frame's bytes, with its length. Raises `InvalidArgument` for a value that does not fit its field."""
    try:
        header = _encode_json(command) if command.serialisation == JSON else _encode_binary(command)
        length = _HEAD_BYTES + len(header) + len(command.body)
        head = struct.pack(">iI", length, command.serialisation << 24 | len(header))
    except struct.error as error:
        raise InvalidArgument(f"this command does not fit a frame ({error})") from error
    if len(header) >= 1 << 24:
        raise InvalidArgument(f"a header has less than 16 MiB, not {len(header):,} bytes")
    return b"".join((head, header, command.body))


def decode_frame(data: bytes) -> Command:
    """Return the command in a frame, given without its length. Raises `InvalidArgument` for an invalid frame."""
    if len(data) < _HEAD_BYTES:
        raise InvalidArgument(f"a frame has {_HEAD_BYTES} bytes or more, not {len(data)}")
    serialisation, length = data[0], int.from_bytes(data[1:_HEAD_BYTES], "big")
    if length > len(data) - _HEAD_BYTES:
        raise InvalidArgument(f"a header of {length:,} bytes is longer than its frame of {len(data):,}")
    header, body = data[_HEAD_BYTES : _HEAD_BYTES + length], data[_HEAD_BYTES + length :]
    if serialisation == JSON:
        known = _decode_json(header)
    elif serialisation == BINARY:
        known = _decode_binary(header)
    else:
        raise InvalidArgument(f"unknown serialisation of a header: {serialisation}")
    return Command(**known, body=body, serialisation=serialisation)


# the JSON header


def json_text(value: Any) -> bytes:
    """Return JSON as RocketMQ's own library writes it: no blanks, sorted names, texts not escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode(errors="replace")


def _encode_json(command: Command) -> bytes:
    header = {
        "code": command.code,
        "flag": command.flag,
        "language": command.language,
        "opaque": command.opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": command.version,
    }
    if command.remark:
        header["remark"] = command.remark
    if command.fields:
        header["extFields"] = dict(command.fields)
    return json_text(header)


def _decode_json(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise InvalidArgument("the header is not a JSON object")
    if header.get("code") is None:
        raise InvalidArgument("the header has no code")
    fields = header.get("extFields") or {}
    if not isinstance(fields, dict):
        raise InvalidArgument("extFields is not a JSON object")
    if len(fields) > MOST_FIELDS:
        raise InvalidArgument(f"a header has at most {MOST_FIELDS} fields, not {len(fields):,}")
    language = header.get("language")
    return {
        **{name: _number(name, header.get(name)) for name in ("code", "opaque", "flag", "version")},
        "language": language if language in _LANGUAGES else _OTHER,
        "remark": _text("remark", header.get("remark")) or None,
        "fields": {name: _text(name, value) for name, value in fields.items() if value not in (None, "")},
    }


def _number(name: str, value: object) -> int:
    """Return a number of a header, also from text, as RocketMQ's library does; 0 for None."""
    if value is None:
        return 0
    if isinstance(value, str) and value.isascii() and len(value) <= 11 and value.removeprefix("-").isdigit():
        value = int(value)
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise InvalidArgument(f"{name} is not a 32-bit number: {value!r:.40}")
    return value


def _text(name: str, value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise InvalidArgument(f"{name:.40} is not text: {value!r:.40}")


# the binary header


def _encode_binary(command: Command) -> bytes:
    language = command.language if command.language in _LANGUAGES else _OTHER
    fixed = _binary_head.pack(command.code, _LANGUAGES.index(language), command.version, command.opaque, command.flag)
    fields = b"".join(
        _sized(name, ">h") + _sized(value, ">i") for name, value in command.fields.items() if name and value
    )
    return b"".join((fixed, _sized(command.remark or "", ">i"), struct.pack(">i", len(fields)), fields))


def _sized(text: str, kind: str) -> bytes:
    data = text.encode(errors="replace")
    return struct.pack(kind, len(data)) + data


def _decode_binary(data: bytes) -> dict[str, Any]:
    if len(data) < _binary_head.size:
        raise InvalidArgument(f"a binary header has {_binary_head.size} bytes or more, not {len(data)}")
    code, language, version, opaque, flag = _binary_head.unpack_from(data)
    remark, at = _take(data, _binary_head.size, 4)
    packed, _ = _take(data, at, 4)
    fields = {}
    at = count = 0
    while at < len(packed):
        count += 1
        if count > MOST_FIELDS:
            raise InvalidArgument(f"a header has at most {MOST_FIELDS} fields")
        name, at = _take(packed, at, 2)
        value, at = _take(packed, at, 4)
        if name and value:
            fields[name.decode(errors="replace")] = value.decode(errors="replace")
    return {
        "code": code,
        "opaque": opaque,
        "flag": flag,
        "version": version,
        "language": _LANGUAGES[language] if language < len(_LANGUAGES) else _OTHER,
        "remark": remark.decode(errors="replace") or None,
        "fields": fields,
    }


def _take(data: bytes, at: int, width: int) -> tuple[bytes, int]:
    """Return the text at `at`, after its length of `width` bytes, and the position of the next one."""
    begin = at + width
    length = int.from_bytes(data[at:begin], "big", signed=True)
    if begin > len(data) or not 0 <= length <= len(data) - begin:
        raise InvalidArgument(f"a length at byte {at} of a binary header does not fit into it: {length}")
    return data[begin : begin + length], begin + length


ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
# Clients up to 4.9.3 add UNIQUE_KEY_QUERY after signing
_LAST_WITHOUT_UNIQUE = 399


@dataclass(frozen=True, slots=True)
class AccessKey:
    """A secret key, and the prefixes of the topics that it may see; None: every topic."""

    secret: str = field(repr=False)
    topics: tuple[str, ...] | None = None

    def sees(self, topic: str) -> bool:
        """Return whether the key may see a topic."""
        return self.topics is None or topic.startswith(self.topics)


# The key of all requests to a server without keys
EVERY_TOPIC = AccessKey("")


def signature(command: Command, secret: str) -> str:
    """Return the signature of a request with this secret key: Base64 of HMAC-SHA1."""
    unsigned = {SIGNATURE, UNIQUE_KEY_QUERY} if command.version <= _LAST_WITHOUT_UNIQUE else {SIGNATURE}
    # Java orders names by their UTF-16 code units
    names = sorted(command.fields.keys() - unsigned, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    content = "".join(command.fields[name] for name in names).encode(errors="replace")
    return base64.b64encode(hmac.digest(secret.encode(), content + command.body, "sha1")).decode()


def signer_of(command: Command, keys: Mapping[str, AccessKey]) -> AccessKey | None:
    """Return the key of `keys` (by name) with which a request is signed; None: no key."""
    key = keys.get(command.fields.get(ACCESS_KEY, ""))
    sent_signature = command.fields.get(SIGNATURE, "").encode(errors="replace")
    # the same work for an unknown name: the time must not show it
    is_signed = hmac.compare_digest(signature(command, (key or EVERY_TOPIC).secret).encode(), sent_signature)
    return key if is_signed else None


_DIGITS = re.compile(r"-?[0-9]{1,19}", re.ASCII)


class BadRequest(InvalidArgument):
    """The request lacks a field, or a field has an invalid value. The client gets the text."""


def text_of(request: Command, name: str) -> str:
    """Return a field. Raises `BadRequest` if it is missing or not Unicode text."""
    text = request.fields.get(name)
    if text is None:
        raise BadRequest(f"the custom field <{name}> is null")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"the custom field <{name}> is not Unicode text") from None
    return text


def checked_of(check: Callable[[object], str], request: Command, name: str) -> str:
    """Return `check(field)`. Raises `BadRequest`."""
    try:
        return check(text_of(request, name))
    except BadRequest:
        raise
    except InvalidArgument as error:
        raise BadRequest(str(error)) from error


def topic_of(request: Command) -> str:
    """Return the requested topic. Raises `BadRequest`."""
    return checked_of(check_topic, request, "topic")


def number_of(request: Command, name: str) -> int:
    """Return a field that is a whole number. Raises `BadRequest`."""
    text = text_of(request, name)
    if not _DIGITS.fullmatch(text):
        raise BadRequest(f"the custom field <{name}> is not a number")
    return int(text)
