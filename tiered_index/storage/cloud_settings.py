"""Endpoint and credentials of Google's and Azure's stores, by each cloud's own names of environment variables.

docs/clouds.md has the tables. obstore reads most of its own names; these functions add the other names, and refuse a
variable that is set and would have no effect. Messages name variables, never their values. Pure, except that the file
of `GOOGLE_APPLICATION_CREDENTIALS` is read. Threads: any.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tiered_index.errors import ConfigError, StorageMisconfigured
from tiered_index.storage.base import check_endpoint

SETTINGS = "docs/clouds.md has the settings"
# Kinds of Google's credentials files that obstore reads
_CREDENTIALS = ("service_account", "authorized_user")
# Places that Google's libraries ask for the identity of a machine; obstore asks the usual place only
_METADATA = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
# Variables of each cloud's tools that obstore does not know, and their only values with which it agrees. The names of
# projects are not among them: a bucket needs none
_NOT_FOR_GOOGLE: dict[str, tuple[str, ...]] = {
    "GOOGLE_CLOUD_UNIVERSE_DOMAIN": ("googleapis.com",),
    "GOOGLE_API_USE_CLIENT_CERTIFICATE": ("false",),
    "GOOGLE_API_USE_MTLS_ENDPOINT": ("auto", "never"),
    "GOOGLE_CLOUD_QUOTA_PROJECT": (),
    "CLOUDSDK_BILLING_QUOTA_PROJECT": (),
    "CLOUDSDK_CORE_UNIVERSE_DOMAIN": ("googleapis.com",),
    "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": (),
}
_CLOUDS = ("azurecloud", "azurepubliccloud", "azurepublic", "public")
_NOT_OF_AZURE = {"AZURE_CLOUD": _CLOUDS, "AZURE_CLOUD_NAME": _CLOUDS, "AZURE_ENVIRONMENT": _CLOUDS}
# Credentials and identities of gcloud, unless those of a file or a key win over them
_OF_GCLOUD = re.compile("CLOUDSDK_(CONFIG|ACTIVE_CONFIG_NAME|CORE_ACCOUNT|AUTH_.*)")
_GOOGLE_FILES = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
# Credentials of Azure's libraries that obstore does not know, and those that win over them
_NOT_FOR_AZURE = ("AZURE_CLIENT_CERTIFICATE_PATH", "AZURE_USERNAME", "AZURE_PASSWORD")
_OF_AZURE = ("SAS_KEY", "SAS_TOKEN", "TOKEN", "CLIENT_SECRET")
_ACCOUNTS = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
_KEYS = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY")
_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT", "AZURE_ENDPOINT")
_CONNECTION, _EMULATOR = "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_USE_EMULATOR"
# All names with Azure's prefix that have an effect: those above, and those that obstore reads
_FOR_AZURE = {*_ACCOUNTS, *_KEYS, *_ENDPOINTS, _CONNECTION, _EMULATOR} | {
    f"AZURE_STORAGE_{name}"
    for name in ("SAS_KEY", "SAS_TOKEN", "TOKEN", "CLIENT_ID", "CLIENT_SECRET", "TENANT_ID", "AUTHORITY_ID")
}
_FOR_AZURE.add("AZURE_STORAGE_AUTHORITY_HOST")
# Values by which obstore, too, understands no
_NO = ("false", "0", "no", "n", "off")
# The emulator's own account, which its documentation names
_EMULATED = {
    "accountname": "devstoreaccount1",
    "accountkey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}
_IN_CONNECTION = {
    *("accountname", "accountkey", "sharedaccesssignature", "blobendpoint", "endpointsuffix"),
    *("defaultendpointsprotocol", "usedevelopmentstorage"),
}


@dataclass(frozen=True, slots=True)
class CloudSettings:
    """`endpoint` is the service's URL, None the cloud's own; `arguments` are obstore's, among them secrets."""

    endpoint: str | None
    arguments: dict[str, Any]


def google_settings(endpoint_url: str | None, environment: Mapping[str, str]) -> CloudSettings:
    """Return the settings of Google's store. Raises `StorageMisconfigured`.

    The endpoint is that of the URI, else of `STORAGE_EMULATOR_HOST`, else of `GOOGLE_BASE_URL`. An emulator gets no
    credentials.
    """
    variables = _set(environment)
    _refuse([name for name, values in _NOT_FOR_GOOGLE.items() if variables.get(name, "").lower() not in ("", *values)])
    if not any(name in variables for name in (*_GOOGLE_FILES, "GOOGLE_SERVICE_ACCOUNT_KEY", "STORAGE_EMULATOR_HOST")):
        _refuse([name for name in variables if name in _METADATA or _OF_GCLOUD.fullmatch(name)])
    if path := variables.get("GOOGLE_APPLICATION_CREDENTIALS"):
        _check_credentials(Path(path))
    emulator = variables.get("STORAGE_EMULATOR_HOST")
    if endpoint_url or not emulator:
        endpoint = endpoint_url or variables.get("GOOGLE_BASE_URL")
        return CloudSettings(endpoint and _url("GOOGLE_BASE_URL", endpoint), {})
    endpoint = _url("STORAGE_EMULATOR_HOST", emulator if "://" in emulator else f"http://{emulator}")
    # wins over all other credentials
    return CloudSettings(endpoint, {"credential_provider": _no_credentials})


def azure_settings(account: str | None, endpoint_url: str | None, environment: Mapping[str, str]) -> CloudSettings:
    """Return the settings of Azure's store, with `account_name`. Raises `ConfigError`, `StorageMisconfigured`.

    The URI's settings win over the connection string, and that over other variables. Azure's own names win over those
    of obstore.
    """
    variables = _set(environment)
    unknown = {name for name in variables if name.startswith("AZURE_STORAGE_")} - _FOR_AZURE
    _refuse(sorted(unknown))
    _refuse([name for name, values in _NOT_OF_AZURE.items() if variables.get(name, "").lower() not in ("", *values)])
    connection = _connection(variables)
    named = next((variables[variable] for variable in _ACCOUNTS if variable in variables), None)
    name = account or connection.get("accountname") or named or _account_in(connection.get("blobendpoint", ""))
    if not name:
        raise ConfigError(
            "az:// needs the storage account: az://container/prefix?account=NAME, or AZURE_STORAGE_ACCOUNT"
        )
    arguments: dict[str, Any] = {"account_name": name, "use_emulator": False}
    if connection and name != connection.get("accountname", name):
        raise StorageMisconfigured(
            f"{_CONNECTION} is of the account {connection['accountname']!r}, and the URI of {name!r}: correct one"
        )
    if key := connection.get("accountkey"):
        arguments["account_key"] = _base64(_CONNECTION, key)
    elif token := connection.get("sharedaccesssignature"):
        arguments["sas_key"] = token.removeprefix("?")
    else:
        for variable in _KEYS:
            if variable in variables:
                arguments["account_key"] = _base64(variable, variables[variable])
                break
    if len(arguments) == len(("account_name", "use_emulator")):
        has_others = any(
            f"AZURE_STORAGE_{name_of_other}" in variables or f"AZURE_{name_of_other}" in variables
            for name_of_other in _OF_AZURE
        )
        _refuse([variable for variable in _NOT_FOR_AZURE if variable in variables and not has_others])
    endpoint = endpoint_url or _endpoint_in(connection, name)
    for variable in _ENDPOINTS:
        if endpoint is None and variable in variables:
            endpoint = _url(variable, variables[variable])
    return CloudSettings(endpoint, arguments)


def _no_credentials() -> dict[str, Any]:
    return {"token": "", "expires_at": None}


def _set(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not empty."""
    return {name: value.strip() for name, value in environment.items() if value.strip()}


def _refuse(names: list[str]) -> None:
    if names:
        raise StorageMisconfigured(f"{names[0]} is set and has no effect here: unset it; {SETTINGS}")


def _url(name: str, value: str) -> str:
    """Return the URL of a service without its last slash."""
    try:
        check_endpoint(value, name)
    except ConfigError as error:
        raise StorageMisconfigured(f"{error}; {SETTINGS}") from error
    return value.rstrip("/")


def _base64(name: str, key: str) -> str:
    try:
        base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        raise StorageMisconfigured(f"the account key in {name} is not Base64: copy the key again") from None
    return key


def _check_credentials(path: Path) -> None:
    name = "GOOGLE_APPLICATION_CREDENTIALS"
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageMisconfigured(f"{name} names {path}, which can't be read: {error.strerror}") from error
    except ValueError:
        raise StorageMisconfigured(f"{name} names {path}, which is not a JSON file of credentials") from None
    kind = document.get("type") if isinstance(document, dict) else None
    if kind not in _CREDENTIALS:
        known = " or ".join(_CREDENTIALS)
        raise StorageMisconfigured(f"{name} names {path}, whose type is not {known}; {SETTINGS}")


def _connection(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of the connection string, by name in lower case; those of the emulator if one is chosen."""
    parts: dict[str, str] = {}
    for part in variables.get(_CONNECTION, "").split(";"):
        name, is_pair, value = part.strip().partition("=")
        if is_pair and value.strip():
            parts[name.strip().lower()] = value.strip()
        elif part.strip():
            raise StorageMisconfigured(f"{_CONNECTION} has a part without a value: copy the string again")
    # endpoints of other services of the account
    unknown = sorted(name for name in parts if name not in _IN_CONNECTION and not name.endswith("endpoint"))
    if unknown:
        # only a word: anything else may be a secret
        shown = unknown[0] if unknown[0].isalpha() else "a part"
        raise StorageMisconfigured(f"{_CONNECTION} has {shown:.40}, which has no effect here: remove it")
    is_development = parts.get("usedevelopmentstorage", "").lower() == "true"
    # any word that is not a clear no: a misspelt one must not lead to the real cloud
    is_emulated = variables.get(_EMULATOR, "false").lower() not in _NO
    if is_emulated and parts and not is_development:
        raise StorageMisconfigured(f"{_EMULATOR} and {_CONNECTION} name different services: unset one; {SETTINGS}")
    if is_emulated or is_development:
        host = variables.get("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:10000").rstrip("/")
        return {**_EMULATED, "blobendpoint": f"{host}/{_EMULATED['accountname']}"}
    if parts and not {"accountname", "blobendpoint"} & parts.keys():
        raise StorageMisconfigured(f"{_CONNECTION} has neither AccountName nor BlobEndpoint: copy the string again")
    return parts


def _endpoint_in(connection: Mapping[str, str], account: str) -> str | None:
    if endpoint := connection.get("blobendpoint"):
        return _url(f"BlobEndpoint in {_CONNECTION}", endpoint)
    suffix = connection.get("endpointsuffix")
    protocol = connection.get("defaultendpointsprotocol", "https").lower()
    if suffix or protocol != "https":
        return _url(f"the endpoint in {_CONNECTION}", f"{protocol}://{account}.blob.{suffix or 'core.windows.net'}")
    return None


def _account_in(endpoint: str) -> str | None:
    """Return the account of a blob endpoint such as https://ACCOUNT.blob.core.windows.net; None for other hosts."""
    account, dot, service = (urlsplit(endpoint).hostname or "").partition(".")
    return account if dot and service.startswith("blob.") else None
