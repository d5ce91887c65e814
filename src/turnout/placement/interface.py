"""Which network interface of this machine has an address."""

from __future__ import annotations

import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915  # netdevice(7): the first IPv4 address of an interface
IF_INET6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Its name; None where no interface has this address, or that can't be told here (only Linux can)."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        try:
            rows = [line.split() for line in IF_INET6.read_text(encoding="ascii").splitlines()]
        except OSError:
            return None
        return next((row[5] for row in rows if row[0] == wanted.exploded.replace(":", "")), None)
    return next((name for _, name in socket.if_nameindex() if _ipv4(name) == wanted.packed), None)


def _ipv4(interface: str) -> bytes | None:
    try:
        import fcntl  # noqa: PLC0415 - not on every platform
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            row = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:  # it has none
            return None
    return row[20:24]
