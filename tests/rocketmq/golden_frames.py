"""Frames of RocketMQ's remoting protocol, as its own code wrote them."""

import base64
import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

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
