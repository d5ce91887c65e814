"""Checks of updates that must be refused: the old weights go on answering, whatever was wrong.

An engine that takes such an update is restored and reported: as failed where it promises validation, as lacking
it where it does not (stock SGLang loads what it is given).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from turnout.bench.checks.swaps import unchanged
from turnout.bench.registry import CapabilityAbsent, CheckFailed, check
from turnout.bench.replies import refused
from turnout.bench.target import Target, disk_body
from turnout.bench.versions import ModelVersion, broken, cut_a_shard, poisoned, replaced, without_a_shard
from turnout.weights.tensors import HostTensor

DIES = "a loader that fails half-way may end the engine"
Change = Callable[[list[HostTensor]], list[HostTensor]]


async def _refused(t: Target, folder: Path, *mentions: str) -> str:
    """Sends the update; evidence that it was refused by name and that nothing changed."""
    version = ModelVersion(folder, "kit-broken", "")
    answer = await t.wire.post("/update_weights_from_disk", disk_body(version))
    if answer.status == 200:
        await t.load_version(t.versions[0])
        if t.facts.ours:
            raise CheckFailed("the update was taken")
        raise CapabilityAbsent("the update was taken: this engine does not validate what it loads")
    message = refused(answer, *(mentions if t.facts.ours else ()))
    return f"{message[:160]}; {await unchanged(t)}"


async def _changed(t: Target, name: str, change: Change, *mentions: str) -> str:
    return await _refused(t, broken(t.versions[1], t.work / name, change), *mentions)


def _norm(tensors: list[HostTensor]) -> HostTensor:
    """A tensor that every model has: a norm's weight."""
    return next(tensor for tensor in tensors if tensor.name.endswith("norm.weight"))


@check("refusals")
async def refuses_an_unknown_name(t: Target) -> str:
    """A tensor that the model does not have is refused by its name."""

    def change(tensors: list[HostTensor]) -> list[HostTensor]:
        norm = _norm(tensors)
        return [*tensors, HostTensor("model.stranger.weight", norm.dtype, norm.shape, norm.bits)]

    return await _changed(t, "unknown-name", change, "model.stranger.weight")


@check("refusals")
async def refuses_a_missing_tensor(t: Target) -> str:
    """A tensor of the model that the checkpoint lacks is refused by its name."""
    name = _norm(t.versions[1].tensors()).name
    return await _changed(t, "missing", lambda tensors: [x for x in tensors if x.name != name], name)


@check("refusals", risky=DIES)
async def refuses_a_wrong_shape(t: Target) -> str:
    """A tensor of another shape is refused by its name."""
    norm = _norm(t.versions[1].tensors())
    half = HostTensor(norm.name, norm.dtype, (norm.shape[0] // 2,), norm.bits[: norm.shape[0] // 2].copy())
    return await _changed(t, "shape", lambda tensors: replaced(tensors, half, norm.name), norm.name)


@check("refusals")
async def refuses_a_wrong_dtype(t: Target) -> str:
    """A tensor of integers is refused by its name."""
    norm = _norm(t.versions[1].tensors())
    whole = HostTensor(norm.name, "I32", norm.shape, np.ones(norm.shape[0], np.uint32))
    return await _changed(t, "dtype", lambda tensors: replaced(tensors, whole, norm.name), norm.name)


@check("refusals")
async def refuses_nan(t: Target) -> str:
    """A NaN is refused by its tensor's name."""
    norm = _norm(t.versions[1].tensors())
    return await _changed(t, "nan", lambda tensors: replaced(tensors, poisoned(norm), norm.name), norm.name)


@check("refusals", risky=DIES)
async def refuses_a_missing_shard(t: Target) -> str:
    """An index that names a file which is not there is refused."""
    folder = broken(t.versions[1], t.work / "no-shard", lambda tensors: tensors)
    return await _refused(t, folder, without_a_shard(folder))


@check("refusals", risky=DIES)
async def refuses_a_truncated_file(t: Target) -> str:
    """A file that ends too early is refused."""
    folder = broken(t.versions[1], t.work / "truncated", lambda tensors: tensors)
    return await _refused(t, folder, cut_a_shard(folder))


@check("refusals")
async def refuses_a_missing_folder(t: Target) -> str:
    """A folder that is not there is refused."""
    return await _refused(t, t.work / "nowhere")
