"""Options of an S3 storage, and their defaults. This module does not load boto3.

Credentials are not options: they come from Amazon's usual chain (environment, profile, container, instance role).
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from tiered_index.errors import ConfigError
from tiered_index.storage.base import StorageOptions, check_endpoint

_CHOICES = {
    "addressing_style": ("path", "virtual", "auto"),
    "request_payer": ("requester",),
    "client": ("boto3",),
    "sse": ("AES256", "aws:kms", "aws:kms:dsse"),
}
# The greatest values. A socket's time limit of more than 24 days overflows.
_MOST = {
    **dict.fromkeys(("connect_timeout_s", "read_timeout_s", "backoff_s"), 86_400),
    "max_attempts": 1_000,
    "max_pool_connections": 10_000,
}


class S3Options(StorageOptions, Struct, frozen=True, kw_only=True):
    """Options to reach and use an S3 service. Raises `ConfigError` for an impossible value.

    - `endpoint_url`: URL of the service; None: from `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` or the profile, else
      Amazon's.
    - `region`: region of the bucket; None: from the environment or the profile.
    - `profile`: name of a profile in the AWS configuration files; None: the default chain.
    - `addressing_style`: `path`, `virtual` or `auto`; None: `auto` at Amazon, `path` elsewhere.
    - `request_payer`: `requester`: this account pays for requests, which a bucket of *requester pays* demands; None:
      its owner pays.
    - `client`: `boto3`: read by boto3: through a proxy, on servers whose answers obstore refuses, and to trace its
      methods. None: read by obstore.
    - `sse`: server-side encryption of every write: `AES256`, `aws:kms`, `aws:kms:dsse`; None: the bucket's default.
    - `sse_kms_key_id`: the key for `aws:kms*`; None: the account's default key.
    - `connect_timeout_s`: seconds to wait for a connection.
    - `read_timeout_s`: seconds to wait for the next bytes of a response.
    - `max_pool_connections`: connections kept open: best `query_threads` + 4. More are opened on demand, and closed
      after use.
    - `max_attempts`: most attempts of a call, after 5xx, throttling, a lost connection, a wrong or short response, or a
      conflict (409).
    - `backoff_s`: wait before a retry. It is random: at most `backoff_s * 2**n` seconds after the n-th fault, and at
      most 5 seconds. After throttling, `backoff_s` counts as at least 0.5.
    """

    uri_parameters: ClassVar[tuple[str, ...]] = (
        "endpoint_url",
        "region",
        "profile",
        "addressing_style",
        "request_payer",
        "client",
    )
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: str | None = None
    request_payer: str | None = None
    client: str | None = None
    sse: str | None = None
    sse_kms_key_id: str | None = None
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    max_pool_connections: int = 36
    max_attempts: int = 5
    backoff_s: float = 0.1

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in (None, *choices):
                raise ConfigError(f"{name} is {' or '.join(choices)}, not {getattr(self, name)!r}")
        if self.sse_kms_key_id is not None and (self.sse is None or not self.sse.startswith("aws:kms")):
            raise ConfigError("sse_kms_key_id needs sse=aws:kms (or aws:kms:dsse)")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not (value > 0 or name == "backoff_s"):
                raise ConfigError(f"{name} must be positive, not {value!r}")
            if value > most:
                raise ConfigError(f"{name} must be at most {most}, not {value!r}")
        if not self.backoff_s >= 0:
            raise ConfigError(f"backoff_s must not be negative, not {self.backoff_s!r}")
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)
