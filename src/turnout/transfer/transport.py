"""What the update machine's driver asks of a way to engines (`Transport`), whatever bytes it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.weights.tensors import HostTensor

Export = Callable[[], Iterable[HostTensor]]


@dataclass(frozen=True)
class Ready:
    """A version that exists for engines to take. `folder` is None where it lies on no disk; `encoding` is that of a
    delta, empty for a full version; `density` is the share of elements that it holds."""

    version: WeightVersion
    bytes: int
    folder: Path | None = None
    encoding: str = ""
    density: float = 1.0


class Transport(Protocol):
    """A way of versions to engines. `publish` and `prepare` change nothing that an engine serves; from `publish`
    to the end of `committed` the export stays the same, since no train step comes between, unless `detached`.
    Faults of single engines are returned by engine id, not raised. An engine's `holds` says what it is known to
    hold: one of unknown weights (None) needs a full load, whatever the others get."""

    @property
    def detached(self) -> bool:
        """Whether the version that was published last needs its export no more: train steps may go on beside."""
        ...

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        """Fixes the next version by its content; raises WeightError or DeadlineExceeded."""
        ...

    async def prepare(
        self, ready: Ready, export: Export, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Exception | None]:
        """Does all that can be done while the engines serve their old weights. By engine id: None, or its
        WeightError, EngineError or DeadlineExceeded. At least one engine is in the answer; one that is not is asked
        for again, without those that failed. Raises WeightError or DeadlineExceeded where the version itself cannot
        be brought to any engine."""
        ...

    async def activate(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        """Has prepared engines put the version into place: the only moment that pauses them. By engine id: what
        it attests, or why it holds unknown weights."""
        ...

    async def committed(self, version: WeightVersion) -> None:
        """Every required engine attested the version."""
        ...

    async def aborted(self, version: WeightVersion) -> None:
        """The version never becomes current: what engines were given of it and did not activate is taken back."""
        ...

    async def catch_up(
        self, version: WeightVersion, engine: EngineClient, deadline_s: float
    ) -> Attestation | None:
        """Has one engine of unknown weights load a version committed earlier, by the cheapest route; what it then
        attests. None: this way keeps no versions, so the engine waits for the next update. Raises WeightError,
        EngineError or DeadlineExceeded."""
        ...

    async def close(self) -> None:
        """Takes down what stands between updates, at all engines that have a part in it; bounded, and never raises
        for one that does not answer."""
        ...
