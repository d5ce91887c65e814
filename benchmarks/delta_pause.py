"""The pause of a serving engine while it applies a delta, as a streaming client sees it.

An engine process as users run it, one request streaming. While it streams, a delta version is prepared and
activated from disk. `pause_ms`: the longest gap between two tokens from the call to the first token after its
answer, less the median gap of the stream, as a run has it: the running request's KV is computed anew on the new
weights, which takes the longer the larger the model and the longer the request. `pause_kept_kv_ms`: the same where
that KV stays, so that the update alone is seen. Of both also `_activate`: from the call to activate what was
prepared; `_stood`: for how long the engine says that it took no step; `_control`: over as long a time as the update
without one, what the machine does by itself. A model four times as large, of random weights, takes as many changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.versions import CACHE, Pair
from turnout.placement.real import DiskStore, RealClock
from turnout.protocol.sglang import GenerateRequest, SamplingParams
from turnout.serving.launcher import Engine, EngineLaunch, launch
from turnout.serving.weights_client import EngineWeights
from turnout.train.model_zoo import fetch
from turnout.weights.changes import compare
from turnout.weights.checkpoint_io import copy_assets, read_checkpoint
from turnout.weights.delta_io import TensorDelta
from turnout.weights.digest import add, element_sums, finish
from turnout.weights.safetensors_file import write_file
from turnout.weights.store import Published, WeightStore
from turnout.weights.tensors import HostTensor

ENCODING = "packed"  # the default on disk
SHARD_BYTES = 512 << 20
DEADLINE_S = 300.0
PROMPT, NEW = 32, 1500
QUIET_TOKENS = 40  # before an update, and at least as many after it
LARGE_LAYERS = 34  # of double width: 4.0 times the weights
LARGE_SIZES = {576: 1152, 1536: 3072, 192: 384, 49152: 49152}


@dataclass(frozen=True)
class Gaps:
    """One update under a stream: all in milliseconds."""

    pause: float
    activate: float
    stood: float
    control: float
    median: float
    update: float


class Pauses:
    """Owns one engine and a folder; a context manager."""

    def __init__(self, threads: int, repeats: int, model: Path | None = None) -> None:
        self._threads, self._repeats = threads, repeats
        self._model = fetch() if model is None else model
        self._asked = 0

    def __enter__(self) -> Pauses:
        self._folder = Path(tempfile.mkdtemp(prefix="pause-", dir=Path.cwd()))
        self._loop = asyncio.new_event_loop()
        arguments = ("--model-path", str(self._model), "--threads", str(self._threads))
        spec = EngineLaunch("bench", arguments, self._threads, self._folder, DEADLINE_S)
        self._engine: Engine = self._loop.run_until_complete(launch(spec, RealClock()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()
        shutil.rmtree(self._folder)

    def of(self, one: Pair) -> dict[str, Any]:
        """Takes the engine to the pair's base, then forth and back, `repeats` times; the way back keeps KV."""
        store = WeightStore(self._folder / "store", DiskStore(), self._model, SHARD_BYTES)
        store.open("benchmark", 0, "0" * 32)
        versions = [store.publish(one.base, 0)]
        for turn in range(2 * self._repeats):
            states = (one.base, one.new) if turn % 2 == 0 else (one.new, one.base)
            deltas = _deltas(*states)
            versions.append(store.publish_delta(deltas, versions[-1].version, ENCODING, turn + 1))
        first, *later = versions
        weights = EngineWeights(self._engine.client)
        self._loop.run_until_complete(_update(weights, first, "auto", flush=True))
        each = [
            self._loop.run_until_complete(self._under_a_stream(weights, made, flush=turn % 2 == 0))
            for turn, made in enumerate(later)
        ]
        shutil.rmtree(store.root)
        return _summary("pause", each[::2]) | _summary("pause_kept_kv", each[1::2])

    async def _under_a_stream(self, weights: EngineWeights, made: Published, flush: bool) -> Gaps:
        times: list[float] = []
        self._asked += 1
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        request = GenerateRequest(f"pause-{self._asked}", tuple(range(100, 100 + PROMPT)), params)

        async def stream() -> None:
            replies = self._engine.client.generate_stream(request, DEADLINE_S)
            async with contextlib.aclosing(replies):
                async for _ in replies:
                    times.append(time.perf_counter())  # noqa: PERF401 - seen as it grows

        reading = asyncio.create_task(stream())
        try:
            await _grown(times, QUIET_TOKENS, reading)
            began = time.perf_counter()
            prepared, stood = await _update(weights, made, "delta", flush)
            ended = time.perf_counter()
            await _grown(times, len(times) + QUIET_TOKENS, reading)
            while time.perf_counter() < 2 * ended - began + 0.2:
                await _grown(times, len(times) + 1, reading)
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        answered = (await self._engine.client.attest(DEADLINE_S)).root
        if answered != made.version.root:
            raise RuntimeError(f"the engine holds {answered}, not {made.version.root}")
        middle = median(b - a for a, b in pairwise(times[1:]))
        first_after = next(t for t in times if t > ended)
        return Gaps(
            1000 * (_longest(times, began, first_after) - middle),
            1000 * (_longest(times, prepared, first_after) - middle),
            stood,
            1000 * (_longest(times, first_after, first_after + ended - began) - middle),
            1000 * middle,
            1000 * (ended - began),
        )


def _summary(name: str, gaps: Sequence[Gaps]) -> dict[str, Any]:
    return {
        f"{name}_ms": round(median(g.pause for g in gaps), 2),
        f"{name}_activate_ms": round(median(g.activate for g in gaps), 2),
        f"{name}_stood_ms": round(median(g.stood for g in gaps), 2),
        f"{name}_control_ms": round(median(g.control for g in gaps), 2),
        f"{name}_each": [{key: round(value, 2) for key, value in vars(g).items()} for g in gaps],
    }


def _longest(times: Sequence[float], began: float, ended: float) -> float:
    """The longest gap that lies at least in part between the two instants."""
    return max(b - a for a, b in pairwise(times) if b > began and a < ended)


async def _grown(times: list[float], count: int, reading: asyncio.Task[None]) -> None:
    while len(times) < count:
        if reading.done():
            raise RuntimeError(f"the stream ended after {len(times)} tokens: {reading.exception()!r}")
        await asyncio.sleep(0.01)


async def _update(
    weights: EngineWeights, made: Published, load_format: str, flush: bool
) -> tuple[float, float]:
    """Returns the instant at which the version was prepared, and for how many milliseconds the engine stood."""
    label = made.version.label
    prepared = await weights.prepare(str(made.folder), label, DEADLINE_S, load_format)
    instant = time.perf_counter()
    body = {"prepared_id": prepared, "abort_all_requests": False, "flush_cache": flush}
    answer = await weights.client.control("/activate_weights", body, DEADLINE_S)
    if answer.get("success") is not True:
        raise RuntimeError(f"not activated: {answer}")
    return instant, 1000 * answer["pause_s"]


def _deltas(base: Sequence[HostTensor], new: Sequence[HostTensor]) -> list[TensorDelta]:
    found = compare([(old.bits, tensor) for old, tensor in zip(base, new)])
    made = []
    for (change, moved), old in zip(found, base):
        sums = element_sums(old.bits)
        ends = (finish(each, old.dtype, old.shape) for each in (sums, add(sums, moved)))
        made.append(TensorDelta(change, old.bits, *ends))
    return made


def larger(changes: int) -> tuple[Path, Pair]:
    """A checkpoint four times the size of SmolLM2-135M, random, and its next version with so many changes."""
    folder = CACHE / "large"
    if not (folder / "model.safetensors").exists():
        _write_large(folder)
    rng = np.random.default_rng(2)
    base = [HostTensor(t.name, t.dtype, t.shape, t.bits.copy()) for t in read_checkpoint(folder)]
    share, new = changes / sum(tensor.bits.size for tensor in base), []
    for tensor in base:
        bits = tensor.bits.copy()
        chosen = rng.choice(bits.size, round(bits.size * share), replace=False, shuffle=False)
        bits[chosen] ^= np.uint16(1)
        new.append(HostTensor(tensor.name, tensor.dtype, tensor.shape, bits))
    return folder, Pair(0.0, "random", base, new)


def _write_large(folder: Path) -> None:
    source, rng = fetch(), np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    copy_assets(source, folder)
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": LARGE_LAYERS}
    config |= {"num_attention_heads": 18, "num_key_value_heads": 6}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shapes = {t.name: tuple(LARGE_SIZES[n] for n in t.shape) for t in read_checkpoint(source)}
    layer = {name: shape for name, shape in shapes.items() if ".layers.0." in name}
    for number in range(config["num_hidden_layers"]):
        shapes |= {name.replace(".layers.0.", f".layers.{number}."): shape for name, shape in layer.items()}
    tensors = []
    for name, shape in shapes.items():
        values = rng.standard_normal(int(np.prod(shape)), np.float32) * np.float32(0.02)
        values += np.float32(len(shape) == 1)  # norms are near one
        tensors.append(HostTensor(name, "BF16", shape, (values.view(np.uint32) >> 16).astype(np.uint16)))
    write_file(folder / "model.part", tensors)
    (folder / "model.part").rename(folder / "model.safetensors")
    print(f"a model of {sum(t.bits.size for t in tensors)} weights in {folder}", file=sys.stderr)
