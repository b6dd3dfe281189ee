"""`--set NAME=VALUE` gives every setting on the command line; URIs are compared as places."""

from pathlib import Path

import pytest

from tiered_index import IndexConfig
from tiered_index.cli.options import pairs
from tiered_index.cli.output import Output
from tiered_index.cli.session import Session
from tiered_index.cli.write.archived import is_inside
from tiered_index.config import TABLES
from tiered_index.errors import ConfigError, InvalidArgument


def config(*settings: str, **options: object):
    return Session(Output(as_json=True), settings=settings, **options).config()


def test_it_wins_over_file_and_environment_and_options_win_over_it(tmp_path, monkeypatch):
    """It takes tables, ages and truths."""
    file = tmp_path / "index.toml"
    file.write_text("seal_after_s = 1\nslots = 1\nitems = 10\n[s3]\nregion = 'file'\nprofile = 'file'\n")
    monkeypatch.setenv("TIERED_INDEX_SLOTS", "2")
    monkeypatch.setenv("TIERED_INDEX_ITEMS", "20")
    merged = config("slots=3", "s3.region=here", "root=/there", config_file=file, root=Path("/here"))
    assert (merged.seal_after_s, merged.slots, merged.items) == (1, 3, 20)
    assert (merged.s3.region, merged.s3.profile, merged.root) == ("here", "file", Path("/here"))
    parsed = config("retention.age_s=7d", 'retention.topics={"debug-*": "1d"}', "background=false")
    assert (parsed.retention.age_s, parsed.retention.topics, parsed.background) == (604_800, {"debug-*": 86_400}, False)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        (("slotz=5",), ConfigError, "unknown setting 'slotz'; did you mean 'slots'?"),
        (("s3.regoin=x",), ConfigError, "unknown setting 's3.regoin'"),
        (("slots=0",), ConfigError, "setting slots must be at least 1"),
        (("slots",), InvalidArgument, "--set 'slots': write --set NAME=VALUE"),
        (("slots=5", "slots=6"), InvalidArgument, "--set gives 'slots' twice"),
        (("s3=x", "s3.region=y"), InvalidArgument, "--set s3.region and another --set give the same setting"),
        (("slots.x=5",), ConfigError, "setting slots must be a whole number"),
    ],
)
def test_what_is_wrong_is_named(settings, kind, message):
    with pytest.raises(kind) as refused:
        config(*settings)
    assert message in str(refused.value)


REFUSED = {
    "text": ("no-such-9", "'no-such-9'"),
    "number": (-7.25, "-7.25"),
    "huge": (10.0**30, "1e+30"),
    "truth": (True, "true"),
    "list": ([13579], "[13579]"),
    "table": ({"x-9": 2468}, "x-9"),
}
SETTINGS = [name for name in IndexConfig.__struct_fields__ if name not in TABLES]
SETTINGS += [*TABLES, *(f"{table}.{name}" for table, kind in TABLES.items() for name in kind.__struct_fields__)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_error_about_a_setting_shows_the_refused_value(setting):
    """No setting accepts more than three of these values."""
    accepted = 0
    for value, shown in REFUSED.values():
        table, _, name = setting.partition(".")
        try:
            IndexConfig(environment=False, **{table: {name: value} if name else value})
        except ConfigError as error:
            assert f"setting {setting} " in str(error) or f"setting {setting}: " in str(error) or shown == "x-9"
            # a place may have credentials
            assert setting == "storage" or shown.lower() in str(error).lower()
        else:
            accepted += 1
    assert accepted <= 3


def test_the_error_about_a_url_does_not_show_its_credentials():
    for settings in ({"storage": "s3://me:s3cret@b/p"}, {"s3": {"endpoint_url": "https://me:s3cret@host"}}):
        with pytest.raises(ConfigError, match="credentials") as refused:
            IndexConfig(environment=False, **settings)
        assert "s3cret" not in str(refused.value)


def test_a_value_that_may_be_a_secret_is_not_shown():
    for wrong in (["sasl.password=one", "sasl.password=s3cret"], ["=s3cret"]):
        with pytest.raises(InvalidArgument) as refused:
            pairs("--kafka", wrong)
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "prefix", "is_below"),
    [
        ("s3://bucket/a/b", "s3://bucket/a", True),
        ("s3://bucket/a", "s3://bucket/", True),
        ("s3a://bucket/a?profile=x", "s3://bucket", True),
        ("s3://bucket/a%2Fb", "s3://bucket/a", True),
        ("s3://bucket/a-2", "s3://bucket/a", False),
        ("s3://bucket", "s3://bucket/a", False),
        ("gs://bucket/a", "s3://bucket", False),
        ("file:///a/../a/b", "file:///a", True),
        ("file://localhost/a/b", "file:///a", True),
        ("sqlite:///a/b.db", "file:///a", True),
        ("sqlite:///a/b.db", "file:///a/b", False),
    ],
)
def test_the_new_index_of_an_archive_may_not_lie_below_the_prefix_of_the_old_one(uri, prefix, is_below):
    assert is_inside(uri, prefix) is is_below
