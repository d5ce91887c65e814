"""One end of a Gloo group: bound to an address of this host, with a deadline on every call.

Without an address Gloo asks what the name of the host resolves to, which is loopback on many.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist


def gloo_end(store: dist.Store, place: tuple[int, int], host: str, limit: timedelta) -> Any:
    """A ProcessGroupGloo; `place`: rank and how many. Raises RuntimeError where they do not come together."""
    gloo = cast("Any", dist.ProcessGroupGloo)  # torch's stubs lack most of it
    options = gloo._Options()
    options._timeout, options._devices = limit, [gloo.create_device(hostname=host)]
    return gloo(store, *place, options)


def group_store(store: dist.Store, name: str) -> dist.Store:
    """The part of a store under which the ranks of a Gloo group look for one another."""
    return dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
