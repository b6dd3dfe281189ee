"""Addresses as messages carry them, and the message id that is made of one: where a message lies, as 32 or 56 hexadecimal digits. Pure."""

from __future__ import annotations

import ipaddress
import struct
from typing import NamedTuple

from tiered_index.errors import InvalidArgument

__all__ = ["Host", "decode_offset_msg_id", "offset_msg_id", "pack_host", "unpack_host"]


class Host(NamedTuple):
    """An address and a port."""

    ip: str
    """IPv4 or IPv6, in the shortest spelling."""
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def pack_host(host: Host) -> bytes:
    """Return address and port as stored: 8 bytes for IPv4, 20 for IPv6."""
    try:
        return ipaddress.ip_address(host.ip).packed + struct.pack(">i", host.port)
    except (ValueError, struct.error) as error:
        raise InvalidArgument(f"{host!r} is no address and port ({error})") from error


def unpack_host(packed: bytes) -> Host:
    """Return what `pack_host` packed."""
    return Host(str(ipaddress.ip_address(packed[:-4])), int.from_bytes(packed[-4:], "big", signed=True))


def offset_msg_id(store_host: Host, physical_offset: int) -> str:
    """Return the id that names a message by its place: 32 hexadecimal digits for an IPv4 store host, 56 for IPv6."""
    return (pack_host(store_host) + struct.pack(">q", physical_offset)).hex().upper()


def decode_offset_msg_id(msg_id: str) -> tuple[Host, int]:
    """Return store host and physical offset of an `offset_msg_id`; raises `InvalidArgument` for other text."""
    try:
        packed = bytes.fromhex(msg_id) if msg_id.isalnum() else b""
    except ValueError:
        packed = b""
    if len(packed) not in (16, 28):
        raise InvalidArgument(f"{msg_id!r:.80} is no message id: 32 or 56 hexadecimal digits are")
    return unpack_host(packed[:-8]), int.from_bytes(packed[-8:], "big", signed=True)
