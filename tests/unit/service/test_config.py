"""Settings: where they come from, which source wins, and that nothing unknown passes."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from tests.support.cases import each
from tests.support.settings_stub import STUB, stub
from tiered_index import IndexConfig, IndexReader, IndexService, merge
from tiered_index.errors import ConfigError, TieredIndexError
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.prices import PriceTable


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


def test_nested_settings_merge_key_by_key(toml, monkeypatch):
    file = toml('[s3]\nregion = "file"\nmax_attempts = 9\nprofile = "file"')
    monkeypatch.setenv("TIERED_INDEX_S3__REGION", "environment")
    config = IndexConfig.load(file)
    assert (config.s3.region, config.s3.max_attempts, config.s3.profile) == ("environment", 9, "file")
    config = IndexConfig.load(file, s3={"profile": "argument"})
    assert (config.s3.region, config.s3.max_attempts, config.s3.profile) == ("environment", 9, "argument")


def test_a_file_in_the_right_form_is_needed(toml, tmp_path):
    with pytest.raises(ConfigError):
        IndexConfig.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError):
        IndexConfig.load(toml("slots = "))
    with pytest.raises(ConfigError):
        IndexConfig.load(tmp_path)


def test_an_unknown_key_is_an_error_wherever_it_stands(toml, monkeypatch):
    with pytest.raises(ConfigError, match="sluts"):
        IndexConfig.load(toml("sluts = 1"))
    with pytest.raises(ConfigError, match="bogus"):
        IndexConfig.load(toml("[s3]\nbogus = 1"))
    with pytest.raises(ConfigError, match="sluts"):
        IndexConfig.load(sluts=1)
    monkeypatch.setenv("TIERED_INDEX_SLUTS", "1")
    with pytest.raises(ConfigError, match="SLUTS"):
        IndexConfig.load()
    monkeypatch.delenv("TIERED_INDEX_SLUTS")
    monkeypatch.setenv("TIERED_INDEX_S3__BOGUS", "1")
    with pytest.raises(ConfigError, match=r"(?i)bogus"):
        IndexConfig.load()


@pytest.mark.parametrize(
    "setting",
    [
        *each(
            slots=[0], items=[1], root=[""], storage=[""], cache_dir=[""], buffer_max_entries=[0], offset_space=["x"]
        ),
        *each(local_keep_s=[-1], lease_ttl_s=[0], flush_interval_s=[-1, float("nan")]),
    ],
    ids=repr,
)
def test_a_wrong_value_is_named(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        IndexConfig.load(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"slotz": 1}, "unknown setting 'slotz'; did you mean 'slots'?"),
        ({"wholly_other": 1}, "unknown setting 'wholly_other'"),
        ({"s3": {"regoin": "x"}}, "unknown setting 's3.regoin'; did you mean 's3.region'?"),
        ({"prices": {"as_off": "x"}}, "unknown setting 'prices.as_off'; did you mean 'prices.as_of'?"),
        ({"slots": "many"}, "setting slots must be a whole number"),
        ({"slots": 1.5}, "setting slots must be a whole number"),
        ({"seal_after_s": "soon"}, "setting seal_after_s must be a number"),
        ({"background": 7}, "setting background must be true or false"),
        ({"storage": 7}, "setting storage must be text"),
        ({"root": 7}, "setting root must be a path"),
        ({"preset": "x"}, "setting preset must be one of 'native' or 'rocketmq'"),
        ({"query_threads": 257}, "setting query_threads must be at most 256"),
        ({"flush_interval_s": 0}, "setting flush_interval_s must be greater than 0"),
        ({"upload_part_bytes": 5}, "setting upload_part_bytes must be at least 5242880"),
        ({"item_type": int}, "setting item_type must be a class that derives from IndexItem"),
        ({"s3": 7}, "setting s3 must be a table of settings"),
        ({"s3": {"endpoint_url": "x"}}, "setting s3.endpoint_url must look like https://host[:port]"),
        ({"root": "a\0b"}, r"setting root: not a path of this system: 'a\x00b': embedded null byte"),
    ],
    ids=repr,
)
def test_an_error_says_what_is_wrong_in_plain_words(setting, message):
    with pytest.raises(ConfigError) as caught:
        IndexConfig.load(**setting)
    assert str(caught.value) == message


def test_the_nearest_name_with_where_it_stands(toml, monkeypatch):
    file = toml("slotz = 1")
    with pytest.raises(ConfigError, match="unknown setting 'slotz'; did you mean 'slots'") as caught:
        IndexConfig.load(file)
    assert str(caught.value).startswith(str(file))
    with pytest.raises(ConfigError) as caught:
        IndexConfig.load(toml('ROOTT = 1\nitems = "x"\nslotz = 3'))
    for part in ("'ROOTT'; did you mean 'root'?", "'slotz'; did you mean 'slots'?", "items must be a whole number"):
        assert part in str(caught.value)
    monkeypatch.setenv("TIERED_INDEX_ITEMZ", "1")
    with pytest.raises(ConfigError, match="TIERED_INDEX_ITEMZ: unknown setting 'itemz'; did you mean 'items'"):
        IndexConfig.load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('slots = "x"', "{file}: setting slots must be a whole number"),
        ("[s3]\nmax_attempts = -5", "{file}: setting s3.max_attempts must be positive, not -5"),
        ("slots = \n", "{file} is not TOML: Invalid value (at line 1, column 9)"),
        (None, "{file} can't be read: No such file or directory"),
    ],
)
def test_a_wrong_value_of_a_file_is_named_with_the_file(text, message, tmp_path):
    file = tmp_path / "index.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        IndexConfig.load(file, items=10, s3={"region": "here"})
    assert str(caught.value) == message.format(file=file)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SLOTS", "x", ": setting slots must be a whole number"),
        ("slots__x", "1", ": unknown setting 'slots.x'; did you mean 'slots'?"),
        ("S3", "x", " must be a table of settings, as JSON"),
        ("S3", '{"regon": 1}', ": unknown setting 's3.regon'; did you mean 's3.region'?"),
        ("S3__BACKOFF_S", "-1", ": setting s3.backoff_s must not be negative, not -1.0"),
    ],
)
def test_a_wrong_value_of_the_environment_is_named_with_the_variable(variable, value, message, toml, monkeypatch):
    monkeypatch.setenv(f"TIERED_INDEX_{variable}", value)
    with pytest.raises(ConfigError) as caught:
        IndexConfig.load(toml("[s3]\nmax_attempts = 9"))
    assert str(caught.value) == f"environment variable TIERED_INDEX_{variable}{message}"


@pytest.mark.parametrize("value", ["5", "[]", '"eu-1"', "x"])
def test_a_wrong_table_of_the_environment_is_told_beside_one_of_its_values(value, monkeypatch):
    monkeypatch.setenv("TIERED_INDEX_S3__REGION", "here")
    monkeypatch.setenv("TIERED_INDEX_S3", value)
    with pytest.raises(ConfigError, match="TIERED_INDEX_S3 must be a table of settings, as JSON"):
        IndexConfig()


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
    assert STUB.read_text() == stub(), "the stub is made by python -m tests.support.settings_stub"


def test_prices_are_settings(toml, monkeypatch):
    assert IndexConfig.load().prices == PriceTable()
    file = toml("[prices]\nget_per_1000_usd = 1\negress_per_gib_usd = 0.09")
    monkeypatch.setenv("TIERED_INDEX_PRICES__GET_PER_1000_USD", "0.5")
    prices = IndexConfig.load(file, prices={"as_of": "2027-01"}).prices
    assert prices == PriceTable(get_per_1000_usd=0.5, egress_per_gib_usd=0.09, as_of="2027-01")


@pytest.mark.parametrize("wrong", ["-0.1", "nan", "inf", "-inf", "cheap"])
@pytest.mark.parametrize("name", ["put_per_1000_usd", "get_per_1000_usd", "delete_per_1000_usd", "egress_per_gib_usd"])
def test_a_price_that_can_not_be_is_named(name, wrong, monkeypatch):
    monkeypatch.setenv(f"TIERED_INDEX_PRICES__{name.upper()}", wrong)
    with pytest.raises(ConfigError, match=name):
        IndexConfig.load()
    monkeypatch.delenv(f"TIERED_INDEX_PRICES__{name.upper()}")
    with pytest.raises(ConfigError, match="dollars"):
        IndexConfig.load(prices={"dollars": 1})


def test_settings_do_not_load_boto3():
    loaded = "import sys, tiered_index.config; sys.exit('boto3' in sys.modules or 'botocore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


def test_a_configuration_is_immutable_and_its_root_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = IndexConfig.load(root="here")
    assert config.root == tmp_path / "here"
    assert IndexConfig.load(root="~/x").root == Path.home() / "x"
    with pytest.raises(FrozenInstanceError):
        config.slots = 5


@pytest.mark.parametrize("wrong", [-1, "x", None, True, 1.5, "-3"])
def test_a_gap_is_a_number_of_bytes_or_price(wrong):
    assert [IndexConfig(coalesce_gap_bytes=gap).coalesce_gap_bytes for gap in (0, "7", "price")] == [0, 7, "price"]
    with pytest.raises(ConfigError, match="coalesce_gap_bytes"):
        IndexConfig(coalesce_gap_bytes=wrong)


@pytest.mark.parametrize(
    "table",
    [
        {"retention": {"age_s": True}},
        {"retention": {"max_bytes": True}},
        {"retention": {"topics": {"audit": True}}},
        {"s3": {"max_attempts": True}},
        {"prices": {"egress_per_gib_usd": False}},
    ],
)
def test_true_is_no_number_in_a_table(table):
    (name, inner), *_ = table.items()
    with pytest.raises(ConfigError, match=f"{name}.{next(iter(inner))}"):
        IndexConfig(**table)
    assert not IndexConfig(s3={"lean_gets": False}).s3.lean_gets


def test_a_file_may_not_have_names_of_arguments(toml):
    with pytest.raises(ConfigError, match="unknown setting 'environment'; unknown setting 'self'"):
        IndexConfig.load(toml("environment = false\nself = 1"))


@pytest.mark.parametrize("name", ["slots", "seal_after_s", "max_late_s", "storage"])
def test_true_is_no_number(name):
    with pytest.raises(ConfigError, match=f"{name}: must not be true"):
        IndexConfig.load(**{name: True})
    assert IndexConfig.load(background=False).background is False


# as Kubernetes sets them for the Services tiered-index and tiered-index-reader
LINKS = {
    "TIERED_INDEX_SERVICE_HOST": "10.0.0.1",
    "TIERED_INDEX_SERVICE_PORT": "8080",
    "TIERED_INDEX_SERVICE_PORT_HTTP": "8080",
    "TIERED_INDEX_PORT": "tcp://10.0.0.1:8080",
    "TIERED_INDEX_PORT_8080_TCP": "tcp://10.0.0.1:8080",
    "TIERED_INDEX_PORT_8080_TCP_PROTO": "tcp",
    "TIERED_INDEX_PORT_8080_TCP_PORT": "8080",
    "TIERED_INDEX_PORT_8080_TCP_ADDR": "10.0.0.1",
    "TIERED_INDEX_READER_SERVICE_HOST": "10.0.0.2",
    "TIERED_INDEX_READER_PORT_9876_TCP_ADDR": "10.0.0.2",
}


def test_variables_that_kubernetes_makes_of_services_are_passed_over(monkeypatch):
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    assert IndexConfig.load(slots=3).slots == 3
    for near in ("TIERED_INDEX_SERVICE_HOSTS", "TIERED_INDEX_PORTS", "TIERED_INDEX_PORT_8080", "TIERED_INDEX_SLUTS"):
        monkeypatch.setenv(near, "1")
        with pytest.raises(ConfigError, match=near):
            IndexConfig.load()
        monkeypatch.delenv(near)


def test_the_environment_is_left_alone_where_the_caller_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERED_INDEX_SLUTS", "1")
    monkeypatch.setenv("TIERED_INDEX_SLOTS", "99")
    monkeypatch.setenv("TIERED_INDEX_S3__REGION", "nowhere")
    config = IndexConfig(environment=False, items=12)
    assert (config.slots, config.items, config.s3.region) == (None, 12, None)
    assert IndexConfig.load(environment=False).slots is None
    given = {"root": tmp_path / "root", "storage": f"file://{tmp_path}/storage", "environment": False}
    with IndexService.open(slots=7, items=12, **given) as service:
        assert service.config.slots == 7
    with IndexReader.open(**given) as reader:
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


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda root, uri: IndexService.open(root), "root="),
        (lambda root, uri: IndexService.open(Path(root)), "root="),
        (lambda root, uri: IndexService(root), "root="),
        (lambda root, uri: IndexService.open(uri), "storage="),
        (lambda root, uri: IndexService.open(MemoryStorage()), "did you mean storage_backend="),
        (lambda root, uri: IndexReader.open(root), "is the root of an index: give it as root="),
        (lambda root, uri: IndexReader.open(Path(root)), "is the root of an index: give it as root="),
        (lambda root, uri: IndexReader.open(IndexConfig()), "did you mean config="),
        (lambda root, uri: IndexReader.open(MemoryStorage()), "did you mean storage_backend="),
        (lambda root, uri: IndexReader(root), "root="),
        (lambda root, uri: merge(open_storage(uri)), "file://"),
    ],
)
def test_what_is_given_by_position_by_mistake_is_told(call, meant, tmp_path):
    root, uri = str(tmp_path / "root"), f"file://{tmp_path}/storage"
    IndexService.open(root=root, storage=uri, slots=7, items=12).close()
    with pytest.raises(ConfigError, match=meant):
        call(root, uri)


@pytest.mark.parametrize("raised", [True, False])
def test_the_limit_of_open_files_is_left_alone_where_a_setting_says_so(raised, tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr("resource.getrlimit", lambda which: (16, 32))
    monkeypatch.setattr("resource.setrlimit", lambda which, limit: limits.append(limit))
    given = {"root": tmp_path / "root", "storage": f"file://{tmp_path}/storage", "raise_file_limit": raised}
    with IndexService.open(slots=7, items=12, **given), IndexReader.open(**given):
        pass
    assert limits == ([(32, 32)] * 2 if raised else [])
