"""The boundary to boto3: building the one client of an `S3Storage`, and translating values and errors both ways.

Threads: boto3 clients may be used from any thread; building one is done by one thread. The client is never shared
across a fork: open the storage in the process that uses it.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from tiered_index.errors import StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import Bytes
from tiered_index.storage.s3.failures import translate
from tiered_index.storage.s3.options import FEWEST_CONNECTIONS, S3Options
from tiered_index.storage.s3.retry import RetryLoop, count_requests

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_AMAZON = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")


def build_client(options: S3Options, uri: str) -> S3Client:
    """Return a client for `options`; raises `StorageMisconfigured` (unknown profile, unusable endpoint or region)."""
    try:
        session = boto3.Session(profile_name=options.profile, region_name=options.region)
        client = _client(session, options, options.addressing_style or ("path" if options.endpoint_url else None))
        is_chosen = options.addressing_style is not None or options.endpoint_url is not None
        if not is_chosen and not _is_amazon(client.meta.endpoint_url):
            # The environment or the profile names another service; those seldom have a DNS name for each bucket.
            client.close()
            client = _client(session, options, "path")
    except (BotoCoreError, ValueError) as error:
        raise translate(error, doing="opening the storage", uri=uri, name="") from error
    if "@" in urlsplit(client.meta.endpoint_url).netloc:
        # the environment's or the profile's: botocore would repeat it in every error
        client.close()
        raise StorageMisconfigured(
            f"opening {uri}: the endpoint URL must not hold credentials; they have variables of their own"
        )
    count_requests(client)
    return client


def _is_amazon(endpoint_url: str) -> bool:
    return (urlsplit(endpoint_url).hostname or "").endswith(_AMAZON)


def _client(session: boto3.Session, options: S3Options, addressing_style: str | None) -> S3Client:
    style: Any = {"addressing_style": addressing_style} if addressing_style else None
    mode: Literal["standard"] = "standard"
    return session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        config=Config(
            signature_version="s3v4",
            s3=style,
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            max_pool_connections=options.max_pool_connections or FEWEST_CONNECTIONS,
            retries={"mode": mode, "total_max_attempts": 1},
            request_checksum_calculation="when_supported",
            response_checksum_validation="when_supported",
            tcp_keepalive=True,
        ),
    )


class S3Calls:
    """One bucket behind one client: requests in, typed errors out."""

    def __init__(self, client: S3Client, bucket: str, loop: RetryLoop) -> None:
        self._client = client
        self._bucket = bucket
        self.uri = loop.uri
        self.run = loop.run

    def __call__(self, operation: str, doing: str, name: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a request, repeated as `RetryLoop` says, and return the parsed answer."""
        return self.run(doing, name, lambda: self.once(operation, **parameters))

    def once(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make one attempt, within `run`: raises what botocore raises."""
        answer: dict[str, Any] = getattr(self._client, operation)(Bucket=self._bucket, **parameters)
        return answer


def encryption(options: S3Options) -> dict[str, str]:
    """Return the request parameters of server-side encryption."""
    asked = {"ServerSideEncryption": options.sse, "SSEKMSKeyId": options.sse_kms_key_id}
    return {name: value for name, value in asked.items() if value is not None}


def request_body(data: Bytes) -> bytes | bytearray:
    """Return `data` as boto3 takes it; only a memoryview is copied."""
    return data if isinstance(data, bytes | bytearray) else bytes(data)


def epoch_ms(moment: datetime) -> int:
    """Return epoch milliseconds of an answer's time."""
    return round(moment.timestamp() * 1000)


def page_token(answer: dict[str, Any], field: str, uri: str) -> str:
    """Return where a truncated listing goes on; without it the rest would be silently missing."""
    if not answer.get(field):
        raise StorageUnavailable(f"{uri}: a listing says that it goes on but not where ({field} is missing)")
    return str(answer[field])
