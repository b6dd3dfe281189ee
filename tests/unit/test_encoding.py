"""One encoder writes all results as JSON."""

import json
from pathlib import Path

import pytest

from tiered_index.encoding import json_text, show_bytes
from tiered_index.server import wire
from tiered_index.service.jobs.verify_report import Defect
from tiered_index.types import Freshness, LostFile


def test_commands_and_service_encode_results_alike():
    lost = LostFile(file="f", begin_ms=0, end_ms=1, entries=2)
    fresh = Freshness(source="s", as_of_ms=None, positions={})
    for topic in ("orders", "caf\u00e9", "\ud800", "\x7f"):
        document = {"topic": topic, "lost": (lost,), "fresh": fresh, "found": [Defect("f", "part", "problem")]}
        texts = json_text(document), wire.encode(document).decode()
        assert json.loads(texts[0]) == json.loads(texts[1])
        assert all(text.rstrip("\n").isprintable() and text.isascii() for text in texts)
    # as `to_dict` says, fields with `None` are left out
    assert json.loads(texts[0])["fresh"] == {"source": "s", "as_of_ms": None, "positions": {}}
    assert json.loads(json_text({"path": Path("a"), "bytes": b"\x01"})) == {"path": "a", "bytes": "01"}
    with pytest.raises(TypeError, match="object has no form in JSON"):
        json_text({"x": object()})


@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a": ', b"}")])
def test_a_body_of_too_many_levels_for_an_encoder_is_text(begin, end):
    flat = b"[" + b"[], " * 500 + b"0]"
    for levels, form in ((500, "json"), (501, "text")):
        data = begin * (levels - 1) + b"[]" + end * (levels - 1)
        shown = show_bytes(data, "json")
        assert shown["body_format"] == form
        assert all(json_text(shown, indent) for indent in (None, 2)) and wire.encode(shown)
    assert show_bytes(flat, "json")["body_format"] == "json"


def test_numbers_that_json_lacks_are_null_in_commands_and_service():
    for topic in ("orders", "\ud800"):
        document = {"topic": topic, "items": [{"share": float("nan")}, {"share": 1.5}], "most": float("-inf")}
        wanted = {"topic": topic, "items": [{"share": None}, {"share": 1.5}], "most": None}
        for text in (json_text(document), json_text(document, 2), wire.encode(document).decode()):
            assert json.loads(text) == wanted
    assert json_text([float("nan")], allow_nan=True) == "[NaN]"
