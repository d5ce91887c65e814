"""Which of its addresses a host is reached at. The name of a host says nothing of that: on many it resolves to
loopback (Debian's 127.0.1.1), which means another place on every other host."""

from __future__ import annotations

import contextlib
import socket

from turnout.core.errors import WeightError


def own_address(peer: str) -> str:
    """The address of this host from which packets to `peer` (a name or an address) leave, by its own table of
    routes; nothing is sent. Raises WeightError where no route leads there."""
    with contextlib.suppress(OSError):
        (family, kind, *_, where) = socket.getaddrinfo(peer.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    raise WeightError(f"no route to {peer}")
