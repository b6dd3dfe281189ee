"""A process that only reads needs no boto3 if the environment has the bucket's settings. A lookup takes 3 rounds."""

import json
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from botocore.configprovider import BOTOCORE_DEFAUT_SESSION_VARIABLES, DEFAULT_S3_CONFIG_VARS

from tests.storage.scripted_server import Answer, ScriptedServer, error, part
from tests.support.counting_proxy import Action, Request, counting_proxy
from tests.support.loaded import loaded
from tiered_index import IndexService, merge
from tiered_index.errors import InvalidArgument, ObjectNotFound, StorageError, StorageMisconfigured
from tiered_index.storage.base import ObjectInfo, Storage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3 import light as light_module
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

pytest.importorskip("obstore", reason="the extra `object` is not installed")
DATA = bytes(range(256)) * 4
LIST = "<?xml version='1.0'?><ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>{}</ListBucketResult>"
ITEM = (
    "<Contents><Key>{}</Key><Size>3</Size><ETag>x</ETag><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
    "</Contents>"
)
_WAIT_S = 60


class Together:
    """Holds the answers to some requests until all of them have arrived."""

    def __init__(self, parts: list[str]) -> None:
        self._left, self._all = set(parts), threading.Event()
        self.is_held_alone = False

    def meet(self, part: str) -> None:
        self._left.discard(part)
        if not self._left:
            self._all.set()
        self.is_held_alone |= not self._all.wait(_WAIT_S)


def kind(request: Request) -> str:
    """Return the kind of an index's object that a request names."""
    asked = request.path.partition("prefix=")[2].replace("%2F", "/") or request.key
    name = asked.partition("index/")[2]
    return f"{'list' if 'prefix=' in request.path else 'get'} {name.partition('/')[0]}" + name[-8:] * (
        name.endswith(".summary")
    )


def test_a_query_loads_no_boto3_and_takes_three_rounds(server, tmp_path):
    bucket = server.new_bucket()
    uri = f"s3://{bucket}/index?endpoint_url="
    options = {"addressing_style": "path"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        stored = f"{uri}{server.endpoint_url}"
        with IndexService.open(root=tmp_path / "root", storage=stored, slots=16, items=60, s3=options) as index:
            index.put("t", 0, ["k"], 1, 1, 1_600_000_000_000)
            index.seal()
            index.run_lifecycle()
        merge(stored, window="30d")
    with counting_proxy(server.endpoint_url) as proxy:
        four = ["list log", "get checkpoint", "get checkpoint.summary", "get lease"]
        second = Together(four)
        asked: list[str] = []

        def fault(request: Request) -> Action | None:
            asked.append(kind(request))
            return Action(hold=partial(second.meet, asked[-1])) if asked[-1] in four else None

        proxy.fault = fault
        names, answer = queried(f"{uri}{proxy.endpoint_url}", server.environment)
    # the lists of checkpoints and leases, then the held requests together, then the slot group
    first = ["list checkpoint", "list lease"]
    assert sorted(asked[:-1]) == sorted([*first, *four])
    assert asked[-1] == "get data"
    assert not second.is_held_alone
    assert not names & {"boto3", "botocore", "pandas", "pyarrow", "pydantic_settings", "urllib3"}
    # 499 and 121 when this was written: each new module is a decision
    assert len(names) <= 520
    assert len([name for name in names if name.startswith("tiered_index.")]) <= 121
    assert (len(answer["items"]), answer["status"]) == (1, "complete")
    assert answer["freshness"][0]["writer"]["state"] == "closed"


def queried(uri: str, environment: dict[str, str]) -> tuple[set[str], Any]:
    """Return the modules that a process of `query` loads, and its answer."""
    plain = {name: value for name, value in os.environ.items() if not name.upper().startswith(("AWS_", "HTTP"))}
    names, output = loaded("query", "t", "k", "--storage", uri, "--json", env=plain | environment)
    return names, json.loads(output)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A process that has not loaded boto3, and an environment with all settings."""
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    # whole, since boto3 can't be loaded for the first time while botocore seems not to be
    import_module("tiered_index.storage.s3.client")
    monkeypatch.delitem(sys.modules, "botocore")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASCRIPTED")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "scripted-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    return monkeypatch


@pytest.fixture
def light(alone: pytest.MonkeyPatch, answering: ScriptedServer) -> S3Storage:
    answering.reset()
    options = S3Options(endpoint_url=answering.endpoint_url, max_attempts=1, transfer_attempts=1)
    storage = open_storage("s3://bucket/p", options=options)
    assert is_light(storage)
    return storage


def is_light(storage: Storage) -> TypeGuard[S3Storage]:
    assert isinstance(storage, S3Storage)
    return storage._loaded is None


def heavy(server: ScriptedServer) -> list[bool]:
    """Return for each request whether boto3 sent it."""
    return ["amz-sdk-request" in request.lowered for request in server.requests]


def with_file(place: str) -> Callable[[pytest.MonkeyPatch], object]:
    def write(patch: pytest.MonkeyPatch) -> None:
        path = Path(os.environ["HOME"]) / ".aws" / place
        path.parent.mkdir()
        path.write_text("[default]\nregion = eu-west-3\n")

    return write


def test_a_variable_that_changes_no_read_leaves_boto3_alone(alone):
    of_boto3 = [*BOTOCORE_DEFAUT_SESSION_VARIABLES.values(), *DEFAULT_S3_CONFIG_VARS.values()]
    names = [value[1] or [] for value in of_boto3 if value is not None]
    known = {name for some in names for name in ([some] if isinstance(some, str) else some)}
    # sources of credentials, retries, writes, other services, and logging
    harmless = {
        *("AWS_ACCOUNT_ID_ENDPOINT_MODE", "AWS_CSM_CLIENT_ID", "AWS_CSM_ENABLED", "AWS_CSM_HOST", "AWS_CSM_PORT"),
        *("AWS_DISABLE_HOST_PREFIX_INJECTION", "AWS_DISABLE_REQUEST_COMPRESSION", "AWS_EC2_METADATA_SERVICE_ENDPOINT"),
        *("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "AWS_EC2_METADATA_V1_DISABLED", "AWS_ENDPOINT_DISCOVERY_ENABLED"),
        *("AWS_IMDS_USE_IPV6", "AWS_MAX_ATTEMPTS", "AWS_METADATA_SERVICE_NUM_ATTEMPTS"),
        *("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_REQUEST_MIN_COMPRESSION_SIZE_BYTES", "AWS_RETRY_MODE"),
        *("AWS_RESPONSE_CHECKSUM_VALIDATION", "AWS_SDK_UA_APP_ID", "AWS_STS_REGIONAL_ENDPOINTS"),
    }
    read_here = {"AWS_CA_BUNDLE", "AWS_CONFIG_FILE", "AWS_DEFAULT_REGION", "AWS_SHARED_CREDENTIALS_FILE"}
    others = {"AWS_ACCOUNT_ID", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_VAULT", "AWS_XRAY_CONTEXT_MISSING"}
    for name in sorted(name for name in known - read_here | others if name.startswith("AWS_")):
        alone.setenv(name, "1")
        found = light_module.of_environment("bucket", S3Options(max_attempts=1), 10)
        assert (found is not None) == (name in harmless | others), name
        alone.delenv(name)


@pytest.mark.parametrize(
    ("uri", "change"),
    [
        ("s3://bucket", lambda patch: patch.delenv("AWS_DEFAULT_REGION")),
        ("s3://bucket", lambda patch: patch.setenv("AWS_USE_FIPS_ENDPOINT", "true")),
        ("s3://bucket", lambda patch: patch.setenv("AWS_CREDENTIAL_EXPIRATION", "2030-01-01T00:00:00Z")),
        ("s3://bucket", lambda patch: patch.setenv("https_proxy", "http://127.0.0.1:1")),
        ("s3://bucket", lambda patch: patch.setenv("AWS_ENDPOINT_URL", "https://vpce-1.s3.eu-central-1.amazonaws.com")),
        ("s3://bucket", with_file("config")),
        ("s3://bucket", with_file("credentials")),
        ("s3://bucket?region=cn-north-1", None),
        ("s3://with.dots", None),
        ("s3://bucket--use1-az4--x-s3", None),
        ("s3://bucket?addressing_style=virtual", None),
        ("s3://bucket", lambda patch: patch.setitem(sys.modules, "botocore", sys)),
    ],
)
def test_settings_outside_the_environment_need_boto3(alone, uri, change):
    with open_storage("s3://bucket") as storage:
        assert is_light(storage)
    if change is not None:
        change(alone)
    with open_storage(uri) as storage:
        assert not is_light(storage)


def without_home(patch: pytest.MonkeyPatch) -> None:
    patch.delenv("HOME")
    patch.setattr("pwd.getpwuid", lambda _: {}["no such user"])


def with_closed_home(patch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *_: object, **__: object) -> os.stat_result:
        if ".aws" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path)  # type: ignore[call-overload, no-any-return]

    stat = os.stat
    patch.setattr(os, "stat", refuse)


@pytest.mark.parametrize("change", [without_home, with_closed_home])
def test_a_home_that_cannot_be_read_has_no_files_of_amazons(alone, change):
    change(alone)
    with open_storage("s3://bucket") as storage:
        assert is_light(storage)


def test_an_endpoint_that_is_no_url_is_refused_by_boto3(alone):
    alone.setenv("AWS_ENDPOINT_URL", "http://[::1")
    with pytest.raises(StorageMisconfigured, match="Invalid IPv6 URL"):
        open_storage("s3://bucket")


def test_certificates_are_those_that_boto3_trusts(alone, tmp_path):
    chosen, further = tmp_path / "chosen.pem", tmp_path / "further.pem"
    taken: list[object] = []
    alone.setattr(light_module, "open_store", lambda *given, **_: taken.append(given[3]))
    alone.setenv("REQUESTS_CA_BUNDLE", str(further))
    open_storage("s3://bucket").close()
    alone.setenv("AWS_CA_BUNDLE", str(chosen))
    open_storage("s3://bucket").close()
    assert taken == [str(further), str(chosen)]


def test_reads_of_every_kind_are_light(light, answering):
    listing = LIST.format(ITEM.format("p/log/1") + ITEM.format("p/log/2"))
    answering.answers(
        Answer(200, DATA), part(DATA, 3, 9), Answer(200, listing.encode()), Answer(403), part(DATA, 1000, 1024)
    )
    assert light.get("a") == DATA
    assert light.get_range("a", 3, 6) == DATA[3:9]
    assert light.get_range("a", 3, 0) == b""
    listed = light.list("log/", start_after="log/0")
    assert list(listed) == [ObjectInfo(f"log/{number}", 3, 1_700_000_000_000) for number in (1, 2)]
    assert light.now_ms() % 1000 == 0
    assert answering.requests[-1].method == "HEAD"
    with pytest.raises(InvalidArgument, match="the object has 1024 bytes"):
        light.get_range("a", 1000, 100)
    assert not any(heavy(answering))


@pytest.mark.parametrize(
    "answer", [error(503, "SlowDown"), error(403, "AccessDenied"), Answer(200, DATA), part(DATA, 3, 9, total=8)]
)
def test_boto3_sends_requests_that_obstore_does_not_accept(light, answering, answer):
    answering.answers(answer, part(DATA, 3, 9), Answer(200, DATA))
    assert light.get_range("a", 3, 6) == DATA[3:9]
    assert light.get("a") == DATA
    assert heavy(answering) == [False, True, True]


def test_a_missing_object_is_reported_at_once_and_a_missing_bucket_by_boto3(light, answering):
    answering.answers(error(404, "NoSuchKey"))
    with pytest.raises(ObjectNotFound):
        light.get("a")
    assert heavy(answering) == [False]
    answering.answers(error(404, "NoSuchBucket"))
    with pytest.raises(StorageMisconfigured):
        light.get("a")
    assert heavy(answering) == [False, False, True]


@pytest.mark.parametrize(
    "keys",
    [
        [f"p/log/{number:05}" for number in range(1000)],
        ["p/log/2", "p/log/1"],
        ["p/log/1", "p/other/1"],
        ["p/log/a//b"],
    ],
    ids=["a whole page", "no order", "another folder", "an empty part"],
)
def test_a_listing_that_may_not_be_whole_is_left_to_boto3(light, answering, keys):
    """obstore takes a page without the token of the next one for the last."""
    truncated = LIST.format("".join(map(ITEM.format, keys))).replace(">false<", ">true<")
    answering.answers(Answer(200, truncated.encode()), Answer(200, truncated.encode()), error(500, "InternalError"))
    with pytest.raises(StorageError):
        list(light.list("log/"))
    assert heavy(answering)[:2] == [False, True]


def test_a_write_is_boto3s_and_so_is_all_after_it(light, answering):
    answering.answers(Answer(200, b"", {"ETag": '"x"'}), Answer(200, DATA))
    light.put("a", DATA)
    assert light.get("a") == DATA
    assert heavy(answering) == [True, True]
    light.close()
