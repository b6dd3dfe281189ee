"""Endpoint and credentials of `gs://` and `az://`, by each cloud's own names."""

import contextlib
import json
from pathlib import Path

import pytest

from tiered_index.errors import ConfigError, StorageMisconfigured
from tiered_index.storage.cloud_settings import azure_settings, google_settings

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
        ((None, None), {"AZURE_STORAGE_USE_EMULATOR": "true"}, DEVELOPMENT, None, None),
        ((None, None), {"AZURE_STORAGE_USE_EMULATOR": "Yes"}, DEVELOPMENT, None, None),
        (("acc", None), {"AZURE_STORAGE_USE_EMULATOR": "off"}, None, "acc", {}),
    ],
)
def test_azure(uri, environment, endpoint, account, further):
    settings = azure_settings(*uri, environment)
    assert settings.endpoint == endpoint
    assert settings.arguments["account_name"] == (account or "devstoreaccount1")
    if further is not None:
        assert settings.arguments == {"account_name": account, "use_emulator": False, **further}


@pytest.mark.parametrize(
    ("account", "environment", "told"),
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
def test_what_has_no_effect_or_is_wrong_is_named_without_its_value(account, environment, told):
    with pytest.raises(ConfigError, match=told) as raised:
        azure_settings(account, None, environment)
    assert "secret" not in str(raised.value)


def test_credentials_files_that_google_would_take_are_named(tmp_path: Path):
    file = tmp_path / "credentials.json"
    variables = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    for text, told in (
        (None, "can't be read: No such file"),
        ("no JSON", "not a JSON file"),
        (json.dumps({"type": "external_account"}), "whose type is not service_account or authorized_user"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(StorageMisconfigured, match=f"GOOGLE_APPLICATION_CREDENTIALS names .*{told}"):
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
    told = f"{name} is set and has no effect here: unset it"
    with pytest.raises(StorageMisconfigured, match=told):
        google_settings(None, {name: "elsewhere"})
    with contextlib.nullcontext() if wins else pytest.raises(StorageMisconfigured, match=told):
        google_settings(None, {name: "elsewhere", "GOOGLE_SERVICE_ACCOUNT_KEY": "{}"})


def test_names_that_agree_with_the_usual_cloud_are_accepted():
    google = {"GOOGLE_API_USE_MTLS_ENDPOINT": "auto", "CLOUDSDK_CORE_PROJECT": "p", "GOOGLE_CLOUD_PROJECT": "p"}
    assert google_settings(None, google).arguments == {}
    assert azure_settings("acc", None, {"AZURE_CLOUD": "AzureCloud"}).endpoint is None
