"""The golden files are those that RocketMQ's code wrote."""

import hashlib
import json

from tests.golden import naive


def test_every_file_has_the_recorded_sha256():
    recorded = json.loads((naive.DATA / "MANIFEST.json").read_text())["sha256"]
    files = [path for path in naive.DATA.rglob("*") if path.is_file() and path.name != "MANIFEST.json"]
    present = {str(path.relative_to(naive.DATA)).removesuffix(".gz") for path in files}
    assert present == set(recorded)
    assert len(recorded) == 203
    for name, expected in recorded.items():
        assert hashlib.sha256(naive.raw(name)).hexdigest() == expected, name
