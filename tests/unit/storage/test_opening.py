"""Valid URIs open a storage. Wrong ones raise an error that names the mistake."""

from pathlib import Path

import pytest

from tests.support.cases import each
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.errors import ConfigError, ObjectNotFound
from tiered_index.spark.addresses import StorageAddress
from tiered_index.storage.disk import Disk
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import beside, open_storage, spelled
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage
from tiered_index.storage.sqlite import SqliteStorage


def test_file(tmp_path: Path) -> None:
    folder = tmp_path / "with blank and é"
    storage = open_storage(folder.as_uri())
    storage.put("a", b"x")
    assert isinstance(storage, LocalStorage)
    assert storage.folder == folder
    assert open_storage(storage.uri).get("a") == b"x"


def test_file_writes_through_the_given_disk(tmp_path: Path) -> None:
    class CountingDisk(Disk):
        created = 0

        def create(self, path: Path) -> int:
            self.created += 1
            return super().create(path)

    disk = CountingDisk()
    open_storage(f"file://{tmp_path}", disk=disk).put("a", b"x")
    assert disk.created == 1


def test_memory_of_one_name_is_one_storage() -> None:
    one = open_storage("memory://test_opening")
    try:
        one.put("a", b"x")
        assert open_storage("memory://test_opening").get("a") == b"x"
        with pytest.raises(ObjectNotFound):
            open_storage("memory://test_opening_other").get("a")
        with pytest.raises(ObjectNotFound):
            MemoryStorage().get("a")
        MemoryStorage.forget("test_opening")
        with pytest.raises(ObjectNotFound):
            open_storage("memory://test_opening").get("a")
    finally:
        MemoryStorage.forget("test_opening")
        MemoryStorage.forget("test_opening_other")


def test_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "with blank, ? and é.db"
    with SqliteStorage(path) as storage:
        storage.put("a", b"x")
        uri = storage.uri
    assert "%3F" in uri
    with open_storage(uri) as again:
        assert isinstance(again, SqliteStorage)
        assert again.path == path
        assert again.get("a") == b"x"
    with open_storage(f"sqlite://localhost{tmp_path}/not%20made.db") as untouched:
        assert list(untouched.list()) == []
    assert not (tmp_path / "not made.db").exists()


def test_s3_parameters_win_over_options() -> None:
    options = S3Options(region="eu-west-1", endpoint_url="http://localhost:1", max_attempts=2)
    storage = open_storage("s3://bucket/a/b/?region=us-west-2&endpoint_url=https://127.0.0.1:9000", options=options)
    assert isinstance(storage, S3Storage)
    assert storage.options == S3Options(region="us-west-2", endpoint_url="https://127.0.0.1:9000", max_attempts=2)
    assert storage.uri == "s3://bucket/a/b?endpoint_url=https://127.0.0.1:9000&region=us-west-2"
    assert storage.client.meta.region_name == "us-west-2"
    assert storage.client.meta.config.s3["addressing_style"] == "path"
    assert storage.client.meta.config.retries == {"mode": "standard", "total_max_attempts": 1}


@pytest.mark.parametrize(("options", "connections"), [({}, 36), ({"max_pool_connections": 7}, 7)])
def test_the_pool_has_the_size_of_the_options(options: dict[str, int], connections: int) -> None:
    with open_storage("s3://bucket", options=S3Options(region="eu-west-1", **options)) as storage:  # type: ignore[arg-type]
        assert isinstance(storage, S3Storage)
        assert storage.client.meta.config.max_pool_connections == connections


def test_amazons_own_endpoint_keeps_botocores_style(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    storage = open_storage("s3://bucket?region=eu-central-1")
    assert isinstance(storage, S3Storage)
    assert storage.client.meta.endpoint_url == "https://s3.eu-central-1.amazonaws.com"
    assert "addressing_style" not in (storage.client.meta.config.s3 or {})
    virtual = open_storage("s3://bucket?region=eu-central-1&addressing_style=virtual")
    assert isinstance(virtual, S3Storage)
    assert virtual.client.meta.config.s3["addressing_style"] == "virtual"


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "file://"),
        ("/just/a/path", "memory://"),
        ("gopher://x", "s3://"),
        ("file://relative/dir", "file:///dir"),
        ("file://", "file:///dir"),
        ("file:///dir?mode=fast", "'mode'"),
        ("file:///dir#part", "fragment"),
        ("s3://", "bucket"),
        ("s3:///prefix", "bucket"),
        ("s3://key:secret@bucket", "no credentials"),
        ("s3://bucket?endpoint_url=http://key:secret@host", "must not hold credentials"),
        ("gs://bucket?endpoint_url=http://key:secret@host", "must not hold credentials"),
        ("az://bucket?account=a&endpoint_url=http://key:secret@host", "must not hold credentials"),
        ("gs://bucket?endpoint_url=host", "endpoint_url must look like https"),
        ("az://bucket?account=a&endpoint_url=host", "endpoint_url must look like https"),
        ("s3://bucket/a//b", "a//b"),
        ("s3://bucket/../b", r"\.\."),
        ("s3://bucket/p?regoin=x", "'regoin'"),
        ("s3://bucket/p?region=", "'region' .* empty"),
        ("s3://bucket/p?region=a&region=b", "'region' .* twice"),
        ("s3://bucket/p?addressing_style=round", "round"),
        ("s3://bucket/p?endpoint_url=localhost:9000", "https://host"),
        ("s3://bucket/p?endpoint_url=http://host:port", "https://host"),
        ("sqlite://", "sqlite:///file.db"),
        ("sqlite:///", "names a file"),
        ("sqlite:///dir/", "names a file"),
        ("sqlite://file.db", "is not absolute"),
        ("sqlite://:memory:", "^sqlite://:memory: is not absolute: write sqlite:///file.db$"),
        (
            "file://cold/a%20b",
            f"^file://cold/a%20b is not absolute: .* did you mean file://{Path.cwd()}/cold/a%20b[?]$",
        ),
        ("sqlite:///file%00.db", "names a file"),
        ("sqlite:///file.db?mode=ro", "'mode'"),
        ("sqlite:///file.db#part", "fragment"),
        ("memory://", "memory://name"),
        ("memory://a b", "memory://name"),
        ("memory://a?x=1", "'x'"),
    ],
)
def test_mistakes_are_config_errors_that_name_them(uri: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_storage(uri)


TOY = """
from dataclasses import dataclass
from typing import ClassVar
from tiered_index.storage.base import StorageOptions
from tiered_index.storage.memory import MemoryStorage

@dataclass(frozen=True, slots=True, kw_only=True)
class GsOptions(StorageOptions):
    uri_parameters: ClassVar = ("project",)
    project: str = "default"

class Toy(MemoryStorage):
    options_type = GsOptions

    @classmethod
    def from_uri(cls, uri, options):
        made = cls(f"{uri.netloc}{uri.path}")
        made.uri, made.options = f"toy://{uri.netloc}{uri.path}?project={options.project}", options
        return made
"""


@pytest.fixture
def toy_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with its own storages, as an installer leaves it."""
    (tmp_path / "toy_storages.py").write_text(TOY)
    (tmp_path / "toy_storages-1.dist-info").mkdir()
    (tmp_path / "toy_storages-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (tmp_path / "toy_storages-1.dist-info" / "entry_points.txt").write_text(
        "[tiered_index.storages]\ntoy = toy_storages:Toy\nbad = toy_storages:Absent\ns3 = toy_storages:Toy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("toy_package")
def test_another_package_adds_a_scheme_with_options_of_its_own(tmp_path: Path) -> None:
    where = {"root": tmp_path / "root", "storage": "toy://bucket/toy?project=p1", "environment": False}
    with IndexService.open(**where, slots=10, items=100, background=False) as index:
        index.put("orders", 0, "k", offset=1, size=9, timestamp_ms=1_700_000_000_000)
        index.seal()
        index.run_lifecycle()
        assert index.storage.uri == "toy://bucket/toy?project=p1"
    with IndexReader.open("toy://bucket/toy") as reader:
        assert len(reader.query("orders", "k")) == 1
    own = type(open_storage("toy://bucket/toy").options)(project="p2")
    assert open_storage("toy://bucket/toy", options=own).uri.endswith("p2")
    assert open_storage("toy://bucket/toy", options=S3Options()).uri.endswith("default")
    assert isinstance(open_storage("s3://bucket"), S3Storage)
    for wrong, problem in (
        ("toy://bucket?region=x", r"unknown parameter 'region' in a toy:// URI \(known: project\)"),
        ("toy://user:secret@bucket", "holds no credentials"),
        ("bad://bucket", r"bad:// \(toy_storages:Absent\) can't be loaded"),
        ("ftp://bucket", "starts with az://, bad://, file://, gs://, memory://, s3://, sqlite://, toy://"),
    ):
        with pytest.raises(ConfigError, match=problem):
            open_storage(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sse": "AES256", "sse_kms_key_id": "key"},
        *each(sse=["rot13"], sse_kms_key_id=["key"], max_attempts=[0], max_pool_connections=[0]),
        *each(read_timeout_s=[0], backoff_s=[-1], addressing_style=["round"]),
    ],
)
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(reversed(wrong))):
        S3Options(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spelling", "uri"),
    [
        ("s3a://bucket/p?region=x", "s3://bucket/p?region=x"),
        ("GCS://bucket/p", "gs://bucket/p"),
        ("abfss://box@acc.dfs.core.windows.net/p/q", "az://box/p/q?account=acc"),
        ("wasbs://box@acc.blob.core.windows.net", "az://box?account=acc"),
        (
            "abfs://box@acc.dfs.core.chinacloudapi.cn/p",
            "az://box/p?account=acc&endpoint_url=https://acc.blob.core.chinacloudapi.cn",
        ),
        ("abfss://box/p?account=acc", "az://box/p?account=acc"),
        ("file:///dir", "file:///dir"),
        ("/dir", "/dir"),
    ],
)
def test_spellings_of_other_tools_name_the_same_storage(spelling, uri, tmp_path):
    assert spelled(spelling) == spelled(uri) == uri
    if "://" in uri:
        assert IndexConfig(storage=spelling).storage == uri
        assert open_storage(spelling).uri.split("?")[0] == open_storage(uri).uri.split("?")[0] == uri.split("?")[0]


@pytest.mark.parametrize(
    ("uri", "storage", "expected"),
    [
        ("s3a://other/day.csv", "s3://b/p?endpoint_url=http://h:1", "s3://other/day.csv?endpoint_url=http://h:1"),
        ("s3://other/day.csv?region=x", "s3://b/p?endpoint_url=http://h:1", "s3://other/day.csv?region=x"),
        ("s3://other/day.csv", "gs://b/p?endpoint_url=http://h:1", "s3://other/day.csv"),
        ("s3://other/day.csv", None, "s3://other/day.csv"),
        ("day.csv?", "s3://b/p?endpoint_url=http://h:1", "day.csv?"),
        ("s3", "s3://b/p?region=x", "s3"),
        ("S3://other/day.csv", "s3://b/p?region=x", "S3://other/day.csv?region=x"),
        (
            "abfss://box@acc.dfs.core.windows.net/day.csv",
            "az://b/p?account=acc&endpoint_url=http://h:1/acc",
            "az://box/day.csv?account=acc&endpoint_url=http://h:1/acc",
        ),
        (
            "abfss://box@acc.dfs.core.windows.net/day.csv",
            "az://b/p?account=other&endpoint_url=http://h:1/other",
            "az://box/day.csv?account=acc",
        ),
    ],
)
def test_a_source_without_parameters_takes_those_of_the_index(uri, storage, expected):
    assert beside(uri, storage) == expected


def test_tasks_read_a_source_at_the_indexs_endpoint_too():
    index = "s3a://bucket/index?endpoint_url=http://host:1"
    assert StorageAddress("s3a://other/rows", index=index).uri == "s3://other/rows?endpoint_url=http://host:1"
    assert StorageAddress("s3://other/rows?region=x", index=index).uri == "s3://other/rows?region=x"
