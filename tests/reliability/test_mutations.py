"""A sample of the mutations of every format, and defects that the campaign itself must detect."""

import tempfile
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.reliability import mutations
from tests.reliability.mutated_formats import codecs
from tests.reliability.mutations import Campaign, run, sweep
from tiered_index.errors import TieredIndexError, UnsupportedVersion

SEED = 20_000_000
"""The first seed of the sample, after those of `--all`."""


def test_a_sample_of_every_format() -> None:
    tally = run(500, first=SEED, every=20)
    assert not tally.failures, "\n".join(tally.failures)
    assert {name.removeprefix("mutations of ") for name in tally.tried} - {"end to end"} == {
        codec.name for codec in codecs()
    }


def test_most_changes_get_past_the_check_of_the_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise the campaign would try nothing but that check."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "base").mkdir()
    campaign = Campaign(tmp_path / "base")
    for codec in campaign.codecs:
        refused = 0
        for seed in range(60):
            random = Random(seed)
            path = random.choice(codec.files)
            try:
                codec.decode(codec.reseal(random, campaign.whole[path]), path)
            except UnsupportedVersion:
                refused += 1
            except TieredIndexError:
                pass
        assert refused < 20, codec.name


def test_each_kind_of_failure_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def writes_outside(campaign: Campaign) -> None:
        (tmp_path.parent / "outside").write_text("x")

    def hangs(campaign: Campaign) -> None:
        while True:
            pass

    def raises(campaign: Campaign) -> None:
        raise IndexError

    def warns(campaign: Campaign) -> None:
        np.array([1.0]) / np.array([0.0])

    def answers_what_was_never_put(campaign: Campaign) -> None:
        campaign.name, campaign.put["native"] = "native", {}
        campaign.read()

    def deletes_the_log(campaign: Campaign) -> None:
        campaign.name = "native"
        next((campaign.tree / "native" / "storage" / "log%").iterdir()).unlink()

    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "base").mkdir()
    campaign = Campaign(tmp_path / "base")
    noticed = {
        writes_outside: "wrong",
        hangs: "hangs",
        raises: "untyped",
        warns: "untyped",
        answers_what_was_never_put: "wrong",
        deletes_the_log: "lost",
    }
    for wrong, kind in noticed.items():
        monkeypatch.setattr(mutations, "_MOST_S", 0.3 if kind == "hangs" else 20)
        monkeypatch.setattr(Campaign, "page", wrong)
        tally = sweep(campaign, 1, only=["cursors"])
        assert tally.by_kind == {kind: 1}, (wrong.__name__, tally.failures)
