"""Signed requests: RocketMQ's access key and secret key (`AclClientRPCHook`, `AclSigner`). Pure; threads: any.

The signature is over the fields' values in the order of their names, then the body. Code, opaque and time are not
signed, so who sees a request can repeat it: across an untrusted network use TLS, too.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiered_index.rocketmq.remoting.frames import Command

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
# Clients up to 4.9.3 add this field behind the signature.
_LAST_WITHOUT_UNIQUE = 399


@dataclass(frozen=True, slots=True)
class AccessKey:
    """A secret key, and the prefixes of the topics that it is for; None: every topic."""

    secret: str = field(repr=False)
    topics: tuple[str, ...] | None = None

    def sees(self, topic: str) -> bool:
        """Return whether it is for a topic."""
        return self.topics is None or topic.startswith(self.topics)


# of servers that have no keys
EVERY_TOPIC = AccessKey("")


def signature(command: Command, secret: str) -> str:
    """Return what a client with this secret key signs a request with: Base64 of HMAC-SHA1."""
    unsigned = {SIGNATURE, UNIQUE_KEY_QUERY} if command.version <= _LAST_WITHOUT_UNIQUE else {SIGNATURE}
    # Java orders names by their UTF-16 code units
    names = sorted(command.fields.keys() - unsigned, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    content = "".join(command.fields[name] for name in names).encode(errors="replace")
    return base64.b64encode(hmac.digest(secret.encode(), content + command.body, "sha1")).decode()


def signer_of(command: Command, keys: Mapping[str, AccessKey]) -> AccessKey | None:
    """Return whose signature a request carries, of `keys` by their names; None: nobody's."""
    key = keys.get(command.fields.get(ACCESS_KEY, ""))
    given = command.fields.get(SIGNATURE, "").encode(errors="replace")
    # as much work for a name that is none
    is_signed = hmac.compare_digest(signature(command, (key or EVERY_TOPIC).secret).encode(), given)
    return key if is_signed else None
