"""The trainer as N processes, in the controller: every rank gets every call, and answers it.

A call is one small message to each rank; batches go by the plan's DataTransport, the export and log-probs come back
from rank 0 tensor by tensor, through one file in shared memory or, from another machine, by a connection. Promises:
every call ends within the plan's deadline; a rank that ends, hangs or fails alone makes the call a TrainerLost that
names it with its device, the phase and how it ended or where it is, within seconds for a death, and then all ranks
are ended; an error that all ranks have, or one of ours in any of them, is raised once as what it was. No torch.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import TypeAdapter

from turnout.core.errors import InvariantBroken, TrainerLost, TrainError
from turnout.core.types import TrainBatch, TrainSample
from turnout.placement.footprint import enough
from turnout.train.backend import GivenBack, StepReport
from turnout.train.batch_bytes import bytes_of
from turnout.train.rank_launch import Ranks
from turnout.train.rank_wire import Message, WireClosed, error_of
from turnout.train.settings import TrainerSettings
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

WRITTEN_S = 0.2  # between two questions whether a copy is written
SETTLE_S = 2.0  # from the first sign of a failure until the others have said theirs
LAST_LOOK_S = 1.0  # for ranks to say where they are once a call has failed
LOOK_S = 2.0  # between two looks at where ranks are that have not answered
BETWEEN = ("tensor", "written")  # calls that an export goes on over
TOGETHER = (
    "distributed_c10d.py",
    "collectives.py",
    "_fsdp",
    "fsdp_",
)  # frames of waiting for the other ranks
_REPORT, _SETTINGS = TypeAdapter(StepReport), TypeAdapter(TrainerSettings)


@dataclass
class _Call:
    """A call under way, and what came of it by rank."""

    number: int
    phase: str
    end: float
    answers: dict[int, Message] = field(default_factory=dict[int, Message])
    gone: set[int] = field(default_factory=set[int])
    places: dict[int, str] = field(default_factory=dict[int, str])


class RankedBackend:
    """Implements TrainBackend; see the module. Loads the model on every rank when it is made."""

    def __init__(
        self, settings: TrainerSettings, ranks: Ranks, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._ranks, self._now = ranks, now
        self._lock = threading.RLock()
        self._calls, self._exports, self._steps_done = 0, 0, 0
        self._lost: TrainerLost | None = None
        self._poll = select.poll()
        for wire in ranks.wires:
            self._poll.register(wire.fileno(), select.POLLIN)
        start = {
            "settings": _SETTINGS.dump_python(settings, mode="json"),
            "deadline_s": ranks.plan.deadline_s,
        }
        self._done(self._call("start", {**start, **self._call("meet", {}, [0])[0]}))

    @property
    def steps_done(self) -> int:
        return self._steps_done

    def train(self, batch: TrainBatch) -> StepReport:
        with self._data(batch.samples) as handle:
            answers = self._call("train", {"data": handle, "step": batch.step, "version": batch.version})
        self._done(answers)
        return _REPORT.validate_python(answers[0]["report"])

    def logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        with self._lock:
            with self._data(samples) as handle:
                self._call("logprobs", {"data": handle, "path": self._path})
            ends = np.cumsum([len(sample.response_ids) for sample in samples])
            flat = self._given_back("logprobs", np.float32, int(ends[-1]) if samples else 0)
        return np.split(flat, ends[:-1]) if samples else []

    def export(self) -> Iterator[HostTensor]:
        """One tensor at a time. Raises InvariantBroken where another call came between."""
        with self._lock:
            self._call("export", {})
            mine = self._exports
        while True:
            with self._lock:
                if mine != self._exports:
                    raise InvariantBroken("another call of the trainer came while its weights were read")
                tensor = self._next_tensor()
            if tensor is None:
                return
            yield tensor

    def save(self, folder: Path) -> None:
        self._call("save", {"folder": str(folder)})

    def copied(self) -> Callable[[Path], None]:
        """As Copying's: each rank copies its part, and writes it beside what it computes. The end of that is asked
        for between calls, and so is told after the one that is under way then."""
        self._call("copy", {})
        return self._write

    def _write(self, folder: Path) -> None:
        for wire in self._ranks.wires:
            with suppress(WireClosed):  # told by the next call
                wire.send({"call": "write", "folder": str(folder)})
        told = self._call("written", {})
        while not all(answer["done"] for answer in told.values()):
            time.sleep(WRITTEN_S)
            told = self._call("written", {})
        for rank, answer in sorted(told.items()):
            if (row := answer["fault"]) is not None:
                raise error_of(row) or TrainError(f"{self._ranks.names[rank]}: {row['text']}")

    def load(self, folder: Path) -> None:
        self._done(self._call("load", {"folder": str(folder)}))

    def offload(self) -> GivenBack:
        """As Offloading's: each rank gives its part back. Raises TrainError for one that kept too much of it."""
        given = [GivenBack(**answer) for _, answer in sorted(self._call("offload", {}).items())]
        for name, one in zip(self._ranks.names, given, strict=True):
            if not enough(one.asked, one.fell):
                raise TrainError(f"{name} gave back {one.fell} of {one.asked} bytes (--offload-train)")
        return GivenBack(sum(one.asked for one in given), sum(one.fell for one in given))

    def onload(self) -> None:
        self._done(self._call("onload", {}))

    def _done(self, answers: dict[int, Message]) -> None:
        self._steps_done = answers[0]["steps_done"]

    @contextmanager
    def _data(self, samples: Sequence[TrainSample]) -> Iterator[str]:
        handle = self._ranks.plan.data.put(bytes_of(samples))
        try:
            yield handle
        finally:
            self._ranks.plan.data.drop(handle)

    def _next_tensor(self) -> HostTensor | None:
        told = self._call("tensor", {"path": self._path})[0]
        if told["name"] is None:
            return None
        shape, kind = tuple(told["shape"]), UNSIGNED[ITEM_BYTES[told["dtype"]]]
        return HostTensor(
            told["name"], told["dtype"], shape, self._given_back("tensor", kind, math.prod(shape))
        )

    @property
    def _path(self) -> str | None:
        return None if self._ranks.file is None else str(self._ranks.file)

    def _given_back(self, phase: str, kind: DTypeLike, count: int) -> NDArray[Any]:
        """What rank 0 gives back after its answer to the last call; raises as that."""
        ranks = self._ranks
        if ranks.file is not None:
            return np.fromfile(ranks.file, kind, count)
        assert ranks.back is not None, "one of the two"
        found = np.empty(count, kind)
        call = _Call(self._calls, phase, self._now() + ranks.plan.deadline_s)
        ranks.busy = True
        try:
            ranks.back.read(found.view(np.uint8).data, call.end, self._now)
            call.answers[0] = {"result": {}}
        except WireClosed:
            call.gone.add(0)
        except TimeoutError:
            pass  # it is silent
        finally:
            ranks.busy = False
        self._results(call, [0])
        return found

    def _call(self, phase: str, values: Message, to: Sequence[int] | None = None) -> dict[int, Message]:
        """The results of a call by rank. Raises what the module says."""
        asked = range(self._ranks.plan.count) if to is None else to
        with self._lock:
            if self._lost is not None:
                raise TrainerLost(f"no {phase}: {self._lost}")
            if phase not in BETWEEN:
                self._exports += 1
            self._calls += 1
            call = _Call(self._calls, phase, self._now() + self._ranks.plan.deadline_s)
            for rank in asked:
                self._send(rank, {"id": call.number, "call": phase, **values}, call)
            self._ranks.busy = True
            try:
                self._await(call, set(asked))
                return self._results(call, asked)
            finally:
                self._ranks.busy, self._ranks.places = False, {}

    def _send(self, rank: int, message: Message, call: _Call) -> None:
        try:
            self._ranks.wires[rank].send(message)
        except WireClosed:
            call.gone.add(rank)

    def _await(self, call: _Call, asked: set[int]) -> None:
        """Until all have answered; SETTLE_S longer after the first has failed, at most until the deadline."""
        look = self._now() + LOOK_S
        while missing := asked - call.answers.keys() - call.gone:
            now = self._now()
            if call.gone or any("fault" in answer for answer in call.answers.values()):
                call.end = min(call.end, now + SETTLE_S)
            if now >= call.end:
                return
            if now >= look:
                look = now + LOOK_S
                self._look(missing, call)
            self._hear(call, max(0.0, min(call.end, look) - now))

    def _look(self, missing: set[int], call: _Call) -> None:
        """Asks ranks where they are; what they said last time is what is known till then."""
        self._ranks.places = {rank: call.places.get(rank, "") for rank in sorted(missing)}
        call.places.clear()
        for rank in missing:
            self._send(rank, {"call": "where"}, call)

    def _hear(self, call: _Call, seconds: float) -> None:
        """Takes in what ranks say within so many seconds; at most one message of each."""
        ready = {number for number, _ in self._poll.poll(seconds * 1000)}
        for rank, wire in enumerate(self._ranks.wires):
            if wire.fileno() < 0:  # the run has ended meanwhile
                call.gone.add(rank)
            if rank in call.gone or wire.fileno() not in ready:
                continue
            try:
                message = wire.receive()
            except WireClosed:
                call.gone.add(rank)
                self._poll.unregister(wire.fileno())
                continue
            if "where" in message:
                call.places[rank] = message["where"]
            elif message["id"] == call.number:
                call.answers[rank] = message

    def _results(self, call: _Call, asked: Sequence[int]) -> dict[int, Message]:
        faults = {rank: answer["fault"] for rank, answer in sorted(call.answers.items()) if "fault" in answer}
        complete = len(call.answers) == len(asked)
        if complete and not faults:
            return {rank: answer["result"] for rank, answer in call.answers.items()}
        known = next((error for row in faults.values() if (error := error_of(row)) is not None), None)
        if call.gone:
            known = None  # what the others say follows from that
        elif len(faults) == len(asked) and known is not None:
            done = call.answers[asked[0]]["steps_done"]  # the step may be done that this follows
            self._steps_done = self._steps_done if done is None else done
            raise known
        told = known or TrainerLost(
            f"the trainer failed in phase {call.phase!r}: {self._why(call, asked, faults)}"
        )
        self._lost = told if isinstance(told, TrainerLost) else TrainerLost(str(told))
        self._ranks.kill(told)
        raise told

    def _why(self, call: _Call, asked: Sequence[int], faults: dict[int, Message]) -> str:
        """Which ranks are to blame: those that ended, else those that failed, else those that do not answer."""
        ranks = self._ranks
        if call.gone:
            return "; ".join(ranks.ending(rank) for rank in sorted(call.gone))
        if faults:
            said: dict[str, list[str]] = {}
            for rank, row in faults.items():
                said.setdefault(row["text"], []).append(ranks.names[rank])
            return "; ".join(f"{', '.join(names)}: {text}" for text, names in said.items())
        silent = {rank for rank in asked if rank not in call.answers}
        self._look(silent, call)
        end = self._now() + LAST_LOOK_S
        while silent - call.places.keys() and (left := end - self._now()) > 0:
            self._hear(call, left)
        alone = [rank for rank in sorted(silent) if not _waits_for_others(call.places.get(rank, ""))]
        ranks.places = call.places
        rows = (ranks.standing(rank) + ranks.words(rank) for rank in alone or sorted(silent))
        return f"no answer within {self._ranks.plan.deadline_s:g} s of {'; '.join(rows)}"


def _waits_for_others(place: str) -> bool:
    return any(frame in place for frame in TOGETHER)
