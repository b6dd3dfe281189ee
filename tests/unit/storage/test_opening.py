"""Valid URIs open a storage. Wrong ones raise an error that names the mistake.

Endpoint and credentials of `gs://` and `az://` have each cloud's own names.
"""

import contextlib
import json
from pathlib import Path

import pytest

from tests.support.cases import each
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.errors import ConfigError, StorageMisconfigured
from tiered_index.spark.addresses import StorageAddress
from tiered_index.storage.cloud_settings import azure_settings, google_settings
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.opening import beside, open_storage, spelled
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage
from tiered_index.storage.sqlite import SqliteStorage


def test_folders_and_databases_of_any_name(tmp_path: Path) -> None:
    folder, path = tmp_path / "with blank and é", tmp_path / "with blank, ? and é.db"
    for uri, kind in ((folder.as_uri(), LocalStorage), (SqliteStorage(path).uri, SqliteStorage)):
        with open_storage(uri) as storage:
            storage.put("a", b"x")
            assert isinstance(storage, kind)
        with open_storage(storage.uri) as again:
            assert again.get("a") == b"x"
    assert (folder.is_dir(), path.is_file()) == (True, True)
    with open_storage(f"sqlite://localhost{tmp_path}/not%20made.db") as untouched:
        assert list(untouched.list()) == []
    assert not (tmp_path / "not made.db").exists()


def test_s3_parameters_win_over_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = S3Options(region="eu-west-1", endpoint_url="http://localhost:1", max_attempts=2)
    storage = open_storage("s3://bucket/a/b/?region=us-west-2&endpoint_url=https://127.0.0.1:9000", options=options)
    assert isinstance(storage, S3Storage)
    assert storage.options == S3Options(region="us-west-2", endpoint_url="https://127.0.0.1:9000", max_attempts=2)
    assert storage.uri == "s3://bucket/a/b?endpoint_url=https://127.0.0.1:9000&region=us-west-2"
    assert storage.client.meta.region_name == "us-west-2"
    assert storage.client.meta.config.s3["addressing_style"] == "path"
    assert storage.client.meta.config.retries == {"mode": "standard", "total_max_attempts": 1}
    # Amazon's own endpoint has botocore's style
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for parameter, style in (("", None), ("&addressing_style=virtual", "virtual")):
        storage = open_storage(f"s3://bucket?region=eu-central-1{parameter}")
        assert isinstance(storage, S3Storage)
        assert storage.client.meta.endpoint_url == "https://s3.eu-central-1.amazonaws.com"
        assert (storage.client.meta.config.s3 or {}).get("addressing_style") == style


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "file://"),
        ("/just/a/path", "memory://"),
        ("gopher://x", "s3://"),
        ("file://relative/dir", "file:///dir"),
        ("file://", "file:///dir"),
        ("file:///dir#part", "fragment"),
        ("s3://", "bucket"),
        ("s3://key:secret@bucket", "no credentials"),
        ("abfss://box@acc/p", "write the account so: az://container/prefix"),
        ("az://c?account=acc", "'c' is not a container's name: write az://container/prefix"),
        ("s3://bucket?endpoint_url=http://key:secret@host", "must not hold credentials"),
        ("gs://bucket?endpoint_url=http://key:secret@host", "must not hold credentials"),
        ("az://bucket?account=a&endpoint_url=http://key:secret@host", "must not hold credentials"),
        ("az://bucket?account=a&endpoint_url=host", "endpoint_url must look like https"),
        ("s3://bucket/a//b", "a//b"),
        ("s3://bucket/../b", r"\.\."),
        ("s3://bucket/p?regoin=x", "'regoin'"),
        ("s3://bucket/p?region=", "'region' .* empty"),
        ("s3://bucket/p?region=a&region=b", "'region' .* twice"),
        ("s3://bucket/p?addressing_style=round", "round"),
        ("s3://bucket/p?endpoint_url=localhost:9000", "https://host"),
        ("s3://bucket/p?endpoint_url=http://host:port", "https://host"),
        ("sqlite:///", "names a file"),
        ("sqlite:///dir/", "names a file"),
        ("sqlite://:memory:", "^sqlite://:memory: is not absolute: write sqlite:///file.db$"),
        (
            "file://cold/a%20b",
            f"^file://cold/a%20b is not absolute: .* did you mean file://{Path.cwd()}/cold/a%20b[?]$",
        ),
        ("sqlite:///file%00.db", "names a file"),
        ("memory://", "memory://name"),
        ("memory://a b", "memory://name"),
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


@pytest.mark.parametrize("scheme", ["file", "sqlite", "s3"])
def test_a_uri_with_half_a_surrogate_pair_is_refused_before_anything_is_written(tmp_path: Path, scheme: str) -> None:
    """The root's marker, which is UTF-8, could not have it: nothing could open the root again."""
    for act in (IndexService.open, IndexReader.open):
        with pytest.raises(ConfigError, match="write each as % and two hexadecimal digits"):
            act(root=tmp_path / "root", storage=f"{scheme}://{tmp_path}/s\udcff")
    assert [*tmp_path.iterdir()] == []


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
        ("s3a://other/day.csv", "s3a://b/p?endpoint_url=http://h:1", "s3://other/day.csv?endpoint_url=http://h:1"),
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
    """So do tasks of Spark."""
    assert beside(uri, storage) == expected
    if storage and uri.startswith("s3a:"):
        assert StorageAddress(uri, index=storage).uri == expected


KEY = "c2VjcmV0"
CONNECTION = f"DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={KEY};EndpointSuffix=core.chinacloudapi.cn"
DEVELOPMENT = "http://127.0.0.1:10000/devstoreaccount1"


@pytest.mark.parametrize(
    ("uri", "environment", "endpoint", "arguments"),
    [
        (None, {}, None, []),
        (None, {"STORAGE_EMULATOR_HOST": "localhost:4443"}, "http://localhost:4443", ["credential_provider"]),
        (None, {"STORAGE_EMULATOR_HOST": "https://host/"}, "https://host", ["credential_provider"]),
        ("http://x:1", {"STORAGE_EMULATOR_HOST": "host"}, "http://x:1", []),
        (None, {"GOOGLE_BASE_URL": "http://host:1", "STORAGE_EMULATOR_HOST": " "}, "http://host:1", []),
        (None, {"GOOGLE_API_USE_MTLS_ENDPOINT": "auto", "CLOUDSDK_CORE_PROJECT": "p"}, None, []),
    ],
)
def test_google(uri, environment, endpoint, arguments):
    settings = google_settings(uri, environment)
    assert (settings.endpoint, [*settings.arguments]) == (endpoint, arguments)


@pytest.mark.parametrize(
    ("uri", "environment", "endpoint", "account", "further"),
    [
        (("acc", None), {}, None, "acc", {}),
        ((None, None), {"AZURE_STORAGE_ACCOUNT": "acc", "AZURE_STORAGE_KEY": KEY}, None, "acc", {"account_key": KEY}),
        ((None, None), {"AZURE_STORAGE_ACCOUNT_NAME": "acc"}, None, "acc", {}),
        (("acc", None), {"AZURE_STORAGE_ENDPOINT": "http://host:1/acc"}, "http://host:1/acc", "acc", {}),
        (("acc", "http://x:1"), {"AZURE_STORAGE_ENDPOINT": "http://host:1"}, "http://x:1", "acc", {}),
        (
            (None, None),
            {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION, "AZURE_STORAGE_KEY": "b3RoZXI="},
            "https://acc.blob.core.chinacloudapi.cn",
            "acc",
            {"account_key": KEY},
        ),
        (
            (None, None),
            {
                "AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint=https://acc.blob.core.windows.net/;"
                "SharedAccessSignature=?sv=1&sig=a%3D"
            },
            "https://acc.blob.core.windows.net",
            "acc",
            {"sas_key": "sv=1&sig=a%3D"},
        ),
        ((None, None), {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"}, DEVELOPMENT, None, None),
        ((None, None), {"AZURE_STORAGE_USE_EMULATOR": "Yes"}, DEVELOPMENT, None, None),
        (("acc", None), {"AZURE_STORAGE_USE_EMULATOR": "off", "AZURE_CLOUD": "AzureCloud"}, None, "acc", {}),
    ],
)
def test_azure(uri, environment, endpoint, account, further):
    settings = azure_settings(*uri, environment)
    assert settings.endpoint == endpoint
    assert settings.arguments["account_name"] == (account or "devstoreaccount1")
    if further is not None:
        assert settings.arguments == {"account_name": account, "use_emulator": False, **further}


@pytest.mark.parametrize(
    ("account", "environment", "problem"),
    [
        (None, {}, "needs the storage account"),
        ("acc", {"AZURE_STORAGE_KEY": "sec ret"}, "the account key in AZURE_STORAGE_KEY is not Base64"),
        ("acc", {"AZURE_STORAGE_ACCESS_KEY": "secret"}, "the account key in AZURE_STORAGE_ACCESS_KEY is not Base64"),
        ("acc", {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=acc;AccountKey=secret"}, "is not Base64"),
        ("acc", {"AZURE_STORAGE_CONNECTION_STRING": "secret"}, "a part without a value"),
        ("acc", {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=acc;Sec=secret"}, "sec, which has no effect"),
        ("acc", {"AZURE_STORAGE_CONNECTION_STRING": "SharedAccessSignature=secret"}, "neither AccountName nor"),
        ("other", {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, "of the account 'acc', and the URI of 'other'"),
        ("acc", {"AZURE_STORAGE_SECRET": "secret"}, "AZURE_STORAGE_SECRET is set and has no effect here: unset it"),
        ("acc", {"AZURE_CLIENT_CERTIFICATE_PATH": "/secret"}, "AZURE_CLIENT_CERTIFICATE_PATH is set and has no effect"),
        (
            "acc",
            {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION, "AZURE_STORAGE_USE_EMULATOR": "1"},
            "AZURE_STORAGE_USE_EMULATOR and AZURE_STORAGE_CONNECTION_STRING name different services",
        ),
        ("acc", {"AZURE_CLOUD": "AzureUSGovernment"}, "AZURE_CLOUD is set and has no effect here"),
        ("acc", {"AZURE_STORAGE_ENDPOINT": "secret:80"}, "AZURE_STORAGE_ENDPOINT must look like https"),
    ],
)
def test_what_has_no_effect_or_is_wrong_is_named_without_its_value(account, environment, problem):
    with pytest.raises(ConfigError, match=problem) as raised:
        azure_settings(account, None, environment)
    assert "secret" not in str(raised.value)


def test_credentials_files_that_google_would_take_are_named(tmp_path: Path):
    file = tmp_path / "credentials.json"
    variables = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    for text, problem in (
        (None, "can't be read: No such file"),
        ("no JSON", "not a JSON file"),
        (json.dumps({"type": "external_account"}), "whose type is not service_account or authorized_user"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(StorageMisconfigured, match=f"GOOGLE_APPLICATION_CREDENTIALS names .*{problem}"):
            google_settings(None, variables)
    file.write_text(json.dumps({"type": "service_account"}))
    assert google_settings(None, variables).arguments == {}


@pytest.mark.parametrize(
    ("name", "wins"),
    [
        ("GCE_METADATA_HOST", True),
        ("CLOUDSDK_CONFIG", True),
        ("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", True),
        ("CLOUDSDK_CORE_ACCOUNT", True),
        ("GOOGLE_CLOUD_UNIVERSE_DOMAIN", False),
        ("GOOGLE_API_USE_MTLS_ENDPOINT", False),
        ("GOOGLE_CLOUD_QUOTA_PROJECT", False),
        ("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", False),
    ],
)
def test_names_of_googles_tools_without_effect_are_refused_unless_other_credentials_win(name, wins):
    problem = f"{name} is set and has no effect here: unset it"
    with pytest.raises(StorageMisconfigured, match=problem):
        google_settings(None, {name: "elsewhere"})
    with contextlib.nullcontext() if wins else pytest.raises(StorageMisconfigured, match=problem):
        google_settings(None, {name: "elsewhere", "GOOGLE_SERVICE_ACCOUNT_KEY": "{}"})
