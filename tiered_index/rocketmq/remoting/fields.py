"""What a request says in its fields, checked; what is wrong with one goes to the client as RocketMQ tells it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from tiered_index.errors import InvalidArgument
from tiered_index.rocketmq.remoting.frames import Command
from tiered_index.service.answers.rows import check_topic

_DIGITS = re.compile(r"-?[0-9]{1,19}", re.ASCII)


class BadRequest(InvalidArgument):
    """The request lacks a field, or a field says what none can say; the text goes to the client."""


def text_of(request: Command, name: str) -> str:
    """Return a field. Raises `BadRequest` where it is missing or no Unicode text."""
    text = request.fields.get(name)
    if text is None:
        raise BadRequest(f"the custom field <{name}> is null")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"the custom field <{name}> is no Unicode text") from None
    return text


def checked_of(check: Callable[[object], str], request: Command, name: str) -> str:
    """Return a field that `check` takes. Raises `BadRequest`."""
    try:
        return check(text_of(request, name))
    except BadRequest:
        raise
    except InvalidArgument as error:
        raise BadRequest(str(error)) from error


def topic_of(request: Command) -> str:
    """Return the topic that is asked for. Raises `BadRequest`."""
    return checked_of(check_topic, request, "topic")


def number_of(request: Command, name: str) -> int:
    """Return a field that is a whole number. Raises `BadRequest`."""
    text = text_of(request, name)
    if not _DIGITS.fullmatch(text):
        raise BadRequest(f"the custom field <{name}> is no number")
    return int(text)
