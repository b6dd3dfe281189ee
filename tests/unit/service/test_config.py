"""Settings have several sources in a fixed order, and no unknown setting passes.

Each number is finite, has a bound that the error names, and works up to its bound.
"""

import contextlib
import math
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from msgspec.structs import fields

from tests.support.cases import each
from tests.support.rounds import upload
from tiered_index import IndexConfig, IndexReader, IndexService, merge
from tiered_index.config import TABLES, Settings
from tiered_index.errors import ConfigError, TieredIndexError
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "config.toml"
        path.write_text(text)
        return path

    return write


def test_arguments_win_over_the_environment_and_that_over_the_file(toml, monkeypatch):
    file = toml('slots = 1\nitems = 10\nflush_interval_s = 9.0\nstorage = "memory://file"')
    monkeypatch.setenv("TIERED_INDEX_SLOTS", "2")
    monkeypatch.setenv("TIERED_INDEX_ITEMS", "20")
    config = IndexConfig.load(file, slots=3, storage=None)
    assert (config.slots, config.items, config.flush_interval_s, config.storage) == (3, 20, 9.0, "memory://file")


WRONG = [
    *each(slots=[0], items=[1], root=[""], storage=["", True], cache_dir=[""], buffer_max_entries=[0]),
    *each(lease_ttl_s=[0], offset_space=["x"]),
]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"slotz": 1}, "unknown setting 'slotz'; did you mean 'slots'?"),
        ({"wholly_other": 1}, "unknown setting 'wholly_other'; docs/reference.md lists the settings"),
        ({"retention": {"x": 1}}, "unknown setting 'retention.x'; retention has age_s, topics, max_bytes, "),
        ({"s3": {"regoin": "x"}}, "unknown setting 's3.regoin'; did you mean 's3.region'?"),
        ({"slots": "many"}, "setting slots must be a whole number"),
        ({"slots": True}, "setting slots must not be true"),
        ({"seal_after_s": "soon"}, "setting seal_after_s must be a number"),
        ({"background": 7}, "setting background must be true or false"),
        ({"storage": 7}, "setting storage must be text"),
        ({"root": 7}, "setting root must be a path"),
        ({"root": "a\0b"}, r"setting root: not a path of this system: 'a\x00b': embedded null byte"),
        ({"preset": "x"}, "setting preset must be one of 'native' or 'rocketmq'"),
        ({"query_threads": 257}, "setting query_threads must be at most 256"),
        ({"flush_interval_s": 0}, "setting flush_interval_s must be greater than 0"),
        ({"item_type": int}, "setting item_type must be a class that derives from IndexItem"),
        ({"s3": 7}, "setting s3 must be a table of settings, such as s3.endpoint_url"),
        ({"s3": {"endpoint_url": "x"}}, "setting s3.endpoint_url must look like https://host[:port]"),
        *((setting, f"setting {next(iter(setting))}") for setting in WRONG),
    ],
    ids=repr,
)
def test_an_error_is_in_plain_words(setting, message):
    with pytest.raises(ConfigError) as caught:
        IndexConfig.load(**setting)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('slots = "x"', "{file}: setting slots must be a whole number"),
        ("[s3]\nmax_attempts = -5", "{file}: setting s3.max_attempts must be positive, not -5"),
        ("[s3]\nregoin = 1", "{file}: unknown setting 's3.regoin'; did you mean 's3.region'?"),
        ("slots = \n", "{file} is not TOML: Invalid value (at line 1, column 9)"),
        (None, "{file} can't be read: No such file or directory"),
        # all that is wrong is named
        ('ROOTT = 1\nitems = "x"', "'ROOTT'; did you mean 'root'?"),
        ('ROOTT = 1\nslotz = "x"', "'slotz'; did you mean 'slots'?"),
        # a name of an argument
        ("self = 1", "unknown setting 'self'"),
    ],
)
def test_a_wrong_value_of_a_file_is_named_with_the_file(text, message, tmp_path):
    file = tmp_path / "index.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        IndexConfig.load(file, items=10, s3={"region": "here"})
    assert message.format(file=file) in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SLOTS", "x", ": setting slots must be a whole number, not 'x'"),
        ("ITEMZ", "1", ": unknown setting 'itemz'; did you mean 'items'?"),
        ("slots__x", "1", ": unknown setting 'slots.x'; did you mean 'slots'?"),
        *(
            ("S3", value, f" must be a table of settings, as JSON, not {shown}")
            for value, shown in (("x", "'x'"), ("5", "5"), ("[]", "[]"), ('"eu-1"', "'eu-1'"))
        ),
        ("S3", '{"regon": 1}', ": unknown setting 's3.regon'; did you mean 's3.region'?"),
        ("S3__REGOIN", "x", ": unknown setting 's3.regoin'; did you mean 's3.region'?"),
        ("S3__BACKOFF_S", "-1", ": setting s3.backoff_s must not be negative, not -1.0"),
    ],
)
def test_a_wrong_value_of_the_environment_is_named_with_the_variable(variable, value, message, toml, monkeypatch):
    """Beside other values of its table."""
    monkeypatch.setenv("TIERED_INDEX_S3__REGION", "here")
    monkeypatch.setenv(f"TIERED_INDEX_{variable}", value)
    with pytest.raises(ConfigError) as caught:
        IndexConfig.load(toml("[s3]\nmax_attempts = 9"))
    assert str(caught.value) == f"environment variable TIERED_INDEX_{variable}{message}"


@pytest.mark.parametrize("path", ["/data/my index", "~/cold", "./cold", "cold", Path("/data/cold")], ids=str)
def test_a_path_for_a_storage_suggests_a_file_uri(path):
    with pytest.raises(ConfigError) as caught:
        IndexConfig.load(storage=path)
    uri = Path(path).expanduser().absolute().as_uri()
    assert str(caught.value).endswith(f"sqlite://; did you mean {uri}?")
    with pytest.raises(TieredIndexError) as caught:
        IndexReader.open(path)
    assert str(caught.value).endswith(f"; did you mean {uri}?")


def test_typed_settings_are_those_of_the_configuration():
    declared, typed = get_type_hints(IndexConfig), get_type_hints(Settings)
    assert typed.keys() == declared.keys()
    for name, kind in declared.items():
        accepted = {*parts_of(kind), NoneType}
        accepted |= {str} if Path in accepted or name.endswith("_s") else {dict[str, Any]} if name in TABLES else set()
        assert {*parts_of(typed[name])} == accepted, name


def parts_of(kind):
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def test_a_configuration_is_immutable_and_a_copy_checked_as_the_first_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = IndexConfig.load(root="here")
    assert config.root == tmp_path / "here"
    assert IndexConfig.load(root="~/x").root == Path.home() / "x"
    with pytest.raises(AttributeError):
        config.slots = 5
    assert config.changed(items=9).given == {"root", "items"}
    with pytest.raises(ConfigError, match="unknown setting 'slotz'; did you mean 'slots'"):
        config.changed(slotz=3)
    with pytest.raises(ConfigError, match="lease_ttl_s"):
        config.changed(lease_ttl_s=math.inf)


@pytest.mark.parametrize("wrong", [-1, "x", "Price", None, True, 1.5, float("inf"), float("nan"), "-3"])
def test_a_gap_is_a_number_of_bytes_or_price(wrong):
    for gap, value in ((0, 0), ("7", 7), (2**53 + 1, 2**53 + 1), ("price", "price")):
        assert IndexConfig(coalesce_gap_bytes=gap).coalesce_gap_bytes == value
    with pytest.raises(ConfigError, match=r"coalesce_gap_bytes must (be a whole number of bytes|not be true)"):
        IndexConfig(coalesce_gap_bytes=wrong)


# Kubernetes sets these for the Services tiered-index and tiered-index-reader
LINKS = """
TIERED_INDEX_SERVICE_HOST=10.0.0.1 TIERED_INDEX_SERVICE_PORT=8080 TIERED_INDEX_SERVICE_PORT_HTTP=8080
TIERED_INDEX_PORT=tcp://10.0.0.1:8080 TIERED_INDEX_PORT_8080_TCP=tcp://10.0.0.1:8080
TIERED_INDEX_PORT_8080_TCP_PROTO=tcp TIERED_INDEX_PORT_8080_TCP_PORT=8080 TIERED_INDEX_PORT_8080_TCP_ADDR=10.0.0.1
TIERED_INDEX_READER_SERVICE_HOST=10.0.0.2 TIERED_INDEX_READER_PORT_9876_TCP_ADDR=10.0.0.2
"""


def test_variables_that_kubernetes_makes_of_services_are_passed_over(monkeypatch):
    for link in LINKS.split():
        monkeypatch.setenv(*link.split("="))
    assert IndexConfig.load(slots=3).slots == 3
    for near in ("TIERED_INDEX_SERVICE_HOSTS", "TIERED_INDEX_PORTS", "TIERED_INDEX_PORT_8080", "TIERED_INDEX_SLUTS"):
        monkeypatch.setenv(near, "1")
        with pytest.raises(ConfigError, match=near):
            IndexConfig.load()
        monkeypatch.delenv(near)


@pytest.mark.parametrize("table", ["RETENTION__TOPICS", "retention__topics"])
@pytest.mark.parametrize("topic", ["SEA_PORT", "A_SERVICE_HOST", "PORT", "B_SERVICE_PORT_X", "Orders"])
def test_a_topic_has_its_own_case_and_may_have_the_name_of_such_a_variable(table, topic, monkeypatch):
    monkeypatch.setenv(f"TIERED_INDEX_{table}__{topic}", "36500d")
    assert IndexConfig.load().retention.topics == {topic: 36500 * 86400}


def test_a_table_of_the_environment_keeps_other_settings_of_the_file(toml, monkeypatch):
    file = toml('[retention]\nage_s = "7d"\ntopics = {audit = "36500d"}\n[s3]\nregion = "file"\nmax_attempts = 9')
    monkeypatch.setenv("TIERED_INDEX_RETENTION", '{"age_s": "30d"}')
    monkeypatch.setenv("TIERED_INDEX_S3", '{"region": "environment"}')
    config = IndexConfig.load(file)
    assert (config.retention.age_s, config.retention.topics) == (30 * 86400, {"audit": 36500 * 86400})
    assert (config.s3.region, config.s3.max_attempts) == ("environment", 9)


@pytest.mark.parametrize("place", ["the file", "the environment"])
@pytest.mark.parametrize("higher", ["an argument", "the environment"])
def test_a_wrong_table_is_an_error_also_if_another_place_sets_a_part_of_it(toml, monkeypatch, place, higher):
    """Otherwise the audit entries would expire, although a rule keeps them."""
    file = toml('[retention]\nage_s = "365d"\n' + ('topics = "audit=3650d"' if place == "the file" else ""))
    if place == "the environment":
        monkeypatch.setenv("TIERED_INDEX_RETENTION__TOPICS", '{audit: "3650d"}')
    arguments = {"retention": {"topics": {"debug": "7d"}}} if higher == "an argument" else {}
    if higher == "the environment":
        monkeypatch.setenv("TIERED_INDEX_RETENTION__TOPICS__debug", "7d")
    with pytest.raises(ConfigError, match=r"retention\.topics must be a table"):
        IndexConfig.load(file, **arguments)


def test_the_environment_is_ignored_if_the_caller_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERED_INDEX_SLUTS", "1")
    monkeypatch.setenv("TIERED_INDEX_SLOTS", "99")
    monkeypatch.setenv("TIERED_INDEX_S3__REGION", "nowhere")
    config = IndexConfig(environment=False, items=12)
    assert (config.slots, config.items, config.s3.region) == (None, 12, None)
    assert IndexConfig.load(environment=False).slots is None
    settings = {"root": tmp_path / "root", "storage": f"file://{tmp_path}/storage", "environment": False}
    with IndexService.open(slots=7, items=12, **settings) as service:
        assert service.config.slots == 7
    with IndexReader.open(**settings) as reader:
        assert reader.config.slots is None
    with pytest.raises(ConfigError, match=r"^setting slots must be"):
        IndexConfig.load(environment=False, slots="many")


def test_an_empty_variable_is_not_set(toml, monkeypatch):
    file = toml('root = "/file"\ncache_dir = "/cache"\n[s3]\nregion = "file"')
    for name in ("ROOT", "CACHE_DIR", "STORAGE", "SLOTS", "S3__REGION", "RETENTION__AGE_S", "BACKGROUND"):
        monkeypatch.setenv(f"TIERED_INDEX_{name}", "")
    config = IndexConfig.load(file)
    assert (str(config.root), str(config.cache_dir), config.storage) == ("/file", "/cache", None)
    assert (config.slots, config.s3.region, config.background) == (None, "file", True)
    assert IndexConfig().root is None


def test_a_wrong_positional_argument_is_named(tmp_path):
    root, uri = str(tmp_path / "root"), f"file://{tmp_path}/storage"
    IndexService.open(root=root, storage=uri, slots=7, items=12).close()
    is_root = "is the root of an index: give it as root="
    for call, argument, meant in (
        *((call, argument, "root=") for call in (IndexService.open, IndexService) for argument in (root, Path(root))),
        *((IndexReader.open, argument, is_root) for argument in (root, Path(root))),
        *((call, MemoryStorage(), "did you mean storage_backend=") for call in (IndexService.open, IndexReader.open)),
        (IndexService.open, uri, "storage="),
        (IndexReader.open, IndexConfig(), "did you mean config="),
        (IndexReader, root, "root="),
        (merge, open_storage(uri), "file://"),
    ):
        with pytest.raises(ConfigError, match=meant):
            call(argument)


@pytest.mark.parametrize("raised", [True, False])
def test_the_limit_of_open_files_is_unchanged_if_a_setting_says_so(raised, tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr("resource.getrlimit", lambda which: (16, 32))
    monkeypatch.setattr("resource.setrlimit", lambda which, limit: limits.append(limit))
    settings = {"root": tmp_path / "root", "storage": f"file://{tmp_path}/storage", "raise_file_limit": raised}
    with IndexService.open(slots=7, items=12, **settings), IndexReader.open(**settings):
        pass
    assert limits == ([(32, 32)] * 2 if raised else [])


NOW_MS = 1_700_000_000_000
PATHS = [(each.name,) for each in fields(IndexConfig) if each.name not in TABLES]
PATHS += [(table, name) for table, kind in TABLES.items() for name in kind.__struct_fields__]
VALUES = [math.nan, math.inf, -math.inf, 1e300, 10**30, -1, True, "", None]
# the first that a setting accepts is nearly its greatest
LARGE = [power for value in (10**18, 10**12, 10**9, 86_400, 10_000, 1_000, 256) for power in (value, f"{value}s")]


def kind_of(path):
    hints = get_type_hints(TABLES[path[0]] if path[1:] else IndexConfig)
    return hints[path[-1]]


def works(folder, settings):
    """Open a writer with its threads, and a reader. The writer flushes and seals an entry, and both find it."""
    storage = MemoryStorage()
    arguments = {"environment": False, "root": folder, "slots": 7, "items": 12, **settings}
    arguments.pop("storage", None)
    with IndexService.open(IndexConfig(**arguments), storage_backend=storage) as service:
        service.put("t", 0, "k", 1, 1, NOW_MS)
        service.flush()
        upload(service)
        assert [item.offset for item in service.query("t", "k")] == [1]
        with IndexReader.open(config=service.config.changed(root=None), storage_backend=storage) as reader:
            assert [item.offset for item in reader.query("t", "k")] == [1]
    if "s3" in settings:
        service.config.open_storage("s3://bucket/prefix?region=eu-central-1&endpoint_url=http://127.0.0.1:9").close()


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_value_is_refused_by_name_or_the_index_works(path, tmp_path):
    is_number = {int, float} & {kind_of(path), *get_args(kind_of(path))}
    for number, value in enumerate(VALUES):
        setting = {path[0]: {path[1]: value} if path[1:] else value}
        try:
            if IndexConfig(environment=False, **setting) != IndexConfig(environment=False):
                works(tmp_path / str(number), setting)
        except ConfigError as error:
            assert path[-1] in str(error), f"{value!r}: {error}"
        else:
            is_refused = is_number and value is not None
            assert not is_refused, f"{value!r} is accepted"


def test_large_numbers_work_together(tmp_path):
    """A file of many slots or items is too large for a test, and ages of topics are in `test_retention`."""
    settings = {table: {} for table in TABLES}
    for path in PATHS:
        is_number = {int, float} & {kind_of(path), *get_args(kind_of(path))}
        if not is_number or path[-1].endswith(("slots", "items", "topics")):
            continue
        of_table = settings[path[0]] if path[1:] else settings
        for of_table[path[-1]] in LARGE:
            with contextlib.suppress(ConfigError):
                IndexConfig(environment=False, **{path[0]: settings[path[0]]})
                break
        else:
            pytest.fail(f"{path} accepts no large number")
    works(tmp_path, settings)
