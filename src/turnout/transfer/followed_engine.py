"""The engine beside a follower, over its ordinary HTTP API: embedded, or a stock SGLang. No torch.

Promises: nothing is proved by a label; `prove` compares the root digest of live tensors (level "memory") or every
parameter's checksum with what the local checkpoint gives (level "checksum"); after a failure the engine is named
UNKNOWN where it still takes a name, so that its replies don't claim a version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from turnout.core.errors import ConfigError, EngineError, Fault, WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.access import Access
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.serving.sglang_client import SglangClient
from turnout.transfer.attest import proved
from turnout.weights.stock_checksums import DTYPES, StockEngine, stock_checksums, stock_of
from turnout.weights.tensors import HostTensor

UNKNOWN = "unknown"
LABEL_DEADLINE_S = 10.0
Tensors = Callable[[], Iterable[HostTensor]]


class FollowedEngine(Protocol):
    """What a follower asks of an engine. Every call raises EngineError as the engine or the connection does."""

    name: str

    async def label(self) -> str:
        """What its replies are named with now."""
        ...

    async def load(self, folder: Path, label: str, deadline_s: float) -> None:
        """Loads the folder; anything but a clean success is an EngineError."""
        ...

    async def prove(self, version: WeightVersion, tensors: Tensors, deadline_s: float) -> str:
        """The level at which the engine's live weights are the version; raises WeightError where they are not."""
        ...

    async def disown(self) -> None:
        """Names what is served UNKNOWN; never raises."""
        ...


class HttpEngine:
    """A FollowedEngine at an address. `trust_label` accepts a name where nothing can be proved."""

    def __init__(self, address: Address, token: str | None, clock: Clock, trust_label: bool = False) -> None:
        self.name = address.url
        self._address, self._clock, self._trust_label = address, clock, trust_label
        self._access = Access(admin_key=token)
        self._client: EngineClient | None = None
        self._stock: StockEngine | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def label(self) -> str:
        return await (await self._known()).served_label(LABEL_DEADLINE_S)

    async def load(self, folder: Path, label: str, deadline_s: float) -> None:
        await (await self._known()).load_from_disk(str(folder.resolve()), label, deadline_s)

    async def prove(self, version: WeightVersion, tensors: Tensors, deadline_s: float) -> str:
        client = await self._known()
        found = await client.attest(deadline_s)
        expected = None
        if self._stock is not None and found.checksums:
            expected = await asyncio.to_thread(stock_checksums, tensors(), self._stock)
        trusted = self._trust_label and self._stock is not None
        found = proved(self.name, found, version, expected, trusted)
        if found.root != version.root or found.label != version.label:
            raise WeightError(f"{self.name} serves {found.label} ({found.root}), not {version.label}")
        client.version = version.label
        return found.level

    async def disown(self) -> None:
        with contextlib.suppress(EngineError):
            await (await self._known()).set_version_label(UNKNOWN)

    async def _known(self) -> EngineClient:
        """The client for the kind of engine that answers at the address; asked once."""
        if self._client is not None:
            return self._client
        client = EngineClient("followed", self._address, self._clock, self._access)
        try:
            info = await client.server_info()
            if info.get("engine") != "turnout":
                self._stock = _stock(info)
                await client.close()
                client = SglangClient("followed", self._address, self._clock, self._access)
        except BaseException:
            await client.close()
            raise
        self._client = client
        return client


def _stock(info: dict[str, object]) -> StockEngine:
    found = stock_of(info.get("dtype"), info.get("device"))
    if found is None:
        remedy = f"start it with --dtype {' or '.join(DTYPES)}, the dtype that the trainer exports"
        what = "has a dtype that checksums can't be told for"
        raise ConfigError(Fault("--engine", str(info.get("dtype")), what, remedy))
    return found
