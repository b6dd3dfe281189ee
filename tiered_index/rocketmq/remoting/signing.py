"""Signed requests: RocketMQ's access key and secret key (`AclClientRPCHook`, `AclSigner`). Pure; threads: any.

The signature is over the fields' values in the order of their names, then the body. Code, opaque and time are not
signed, so who sees a request can repeat it: across an untrusted network use TLS, too.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping

from tiered_index.rocketmq.remoting.frames import Command

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
# Clients up to 4.9.3 add this field behind the signature.
_LAST_WITHOUT_UNIQUE = 399


def signature(command: Command, secret: str) -> str:
    """Return what a client with this secret key signs a request with: Base64 of HMAC-SHA1."""
    unsigned = {SIGNATURE, UNIQUE_KEY_QUERY} if command.version <= _LAST_WITHOUT_UNIQUE else {SIGNATURE}
    # Java orders names by their UTF-16 code units
    names = sorted(command.fields.keys() - unsigned, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    content = "".join(command.fields[name] for name in names).encode(errors="replace")
    return base64.b64encode(hmac.digest(secret.encode(), content + command.body, "sha1")).decode()


def is_signed(command: Command, secrets: Mapping[str, str]) -> bool:
    """Return whether a request carries the signature of one of `secrets`, secret keys by access key."""
    secret = secrets.get(command.fields.get(ACCESS_KEY, ""))
    given = command.fields.get(SIGNATURE, "").encode(errors="replace")
    return hmac.compare_digest(signature(command, secret or "").encode(), given) and secret is not None
