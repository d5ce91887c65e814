"""Frozen models of a run: engines that no weight update goes to, such as a reward model or a reference.

Owns what each of them proved of its weights when it was started. Promises: one is asked only after it attested;
what it holds is attested again after each restart, after each turn of the trainer in which its memory was given
back, and at the end of the run, from its live tensors, and is what it was at first, else the run ends with an error
that names engine and both digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnout.core.errors import DeadlineExceeded, EngineError, WeightError
from turnout.core.events import ModelAttested
from turnout.core.ports import EventSink
from turnout.placement.tasks import together
from turnout.serving.client import EngineClient
from turnout.serving.weights_client import EngineWeights


@dataclass(frozen=True)
class Proof:
    """What an engine proved of its live weights: `root` is a digest of them all, at level "label" their name."""

    root: str
    level: str


class FrozenModels:
    """See the module. `trust_label`: an engine that can only name its weights is believed."""

    def __init__(self, events: EventSink, deadline_s: float, trust_label: bool = False) -> None:
        self._events, self._deadline_s, self._trust_label = events, deadline_s, trust_label
        self._first: dict[str, Proof] = {}
        self._up: Mapping[str, EngineClient] = {}  # replaced on change: rewards ask from other threads

    async def joins(self, engine: EngineClient) -> None:
        """Has the engine attest, and compares with its first life. Raises WeightError where it changed or proves
        nothing, EngineError or DeadlineExceeded where it does not answer."""
        await self._attest(engine)
        self._up = {**self._up, engine.engine_id: engine}

    async def returns(self, engine: EngineClient) -> None:
        """Its memory is there again, and nothing in it: has it read its weights anew, from the folder that it was
        started with, and join. Raises as `joins`."""
        told = await engine.model_info(self._deadline_s)
        folder, label = str(told.get("model_path")), str(told.get("weight_version"))
        await engine.load_from_disk(folder, label, self._deadline_s)
        await self.joins(engine)

    @property
    def up(self) -> Sequence[EngineClient]:
        """The engines that may be asked now."""
        return list(self._up.values())

    def lost(self, engine_id: str) -> None:
        """The engine ended, or gives its memory back: it is asked for nothing until it joins again."""
        self._up = {name: engine for name, engine in self._up.items() if name != engine_id}

    def serving(self, model: str) -> Sequence[EngineClient]:
        """The engines of a model that may be asked now."""
        return [engine for engine in self._up.values() if engine.plan.model == model]

    async def stayed(self) -> None:
        """Has every engine that is up attest once more; raises as `joins`, but for one that has just ended."""
        await together(self._still(engine) for engine in self._up.values())

    async def _still(self, engine: EngineClient) -> None:
        try:
            await self._attest(engine)
        except (EngineError, DeadlineExceeded):
            if self._up.get(engine.engine_id) is engine:
                raise

    async def _attest(self, engine: EngineClient) -> None:
        name, model = engine.engine_id, engine.plan.model
        found = await self._proof(engine)
        first = self._first.setdefault(name, found)
        self._events.emit(ModelAttested(name, model, found.root, found.level))
        if found != first:
            raise WeightError(
                f"engine {name} of the frozen model {model!r} holds {found.root}, and held {first.root} when it "
                "was first started: nothing may change a frozen model"
            )

    async def _proof(self, engine: EngineClient) -> Proof:
        """Of an embedded engine the root of its live tensors, computed anew; of a stock SGLang a digest of the
        checksums that it reports."""
        found = await engine.attest(self._deadline_s)
        if found.checksums:
            lines = "".join(f"{name} {value}\n" for name, value in sorted(found.checksums.items()))
            return Proof(hashlib.sha256(lines.encode()).hexdigest(), "checksum")
        if found.root:
            return Proof(await EngineWeights(engine).live_root(self._deadline_s), "memory")
        if self._trust_label:
            return Proof(found.label, "label")
        raise WeightError(
            f"engine {engine.engine_id} can only name its weights, not prove that they stay; "
            "--trust-label takes its word"
        )
