"""Checks of versions that hold only what changed, for engines that announce our format in `delta_formats` of
/server_info; absent for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnout.bench.checks.swaps import serves, wanted
from turnout.bench.facts import info
from turnout.bench.registry import CapabilityAbsent, check, expect
from turnout.bench.replies import refused
from turnout.bench.target import Target, disk_body
from turnout.bench.versions import delta_version
from turnout.weights.manifest import FORMAT, FORMAT_VERSION

NAME = f"{FORMAT}/{FORMAT_VERSION}"


async def _store(t: Target) -> tuple[Path, Path]:
    """Two versions in one store: from the first model version to the second, and from there to the third."""
    announced = (await info(t.wire, "server_info")).get("delta_formats")
    if not isinstance(announced, list) or NAME not in announced:
        raise CapabilityAbsent(f"/server_info announces no {NAME} in delta_formats: {announced}")
    root = t.work / "deltas"
    first, second, third = t.versions[:3]
    return delta_version(root, first, second), delta_version(root, second, third)


def _body(t: Target, folder: Path, version: int) -> dict[str, Any]:
    return disk_body(t.versions[version]) | {"model_path": str(folder), "load_format": "delta"}


@check("updates")
async def update_from_deltas(t: Target) -> str:
    """Two deltas of a store, the second asked for, are answered as by a fresh engine on what they lead to."""
    _, folder = await _store(t)
    await wanted(t, t.versions[2])
    try:
        await t.control("/update_weights_from_disk", _body(t, folder, 2))
        told = await serves(t, t.versions[2])
        await t.control("/update_weights_from_disk", _body(t, folder, 2))
        again = await serves(t, t.versions[2])
    finally:
        await t.load_version(t.versions[0])
    expect(told == again, f"asked for the second time: {again}")
    return f"{told}; the same when asked for again"


@check("updates")
async def delta_of_other_weights(t: Target) -> str:
    """A delta whose base is not what the engine holds, in a store without a way to it, is refused by name."""
    folder, beyond = await _store(t)
    async with t.on(t.versions[2]):
        answer = await t.wire.post("/update_weights_from_disk", _body(t, folder, 1))
        told = refused(answer)
        expect(t.versions[1].root in told, f"the refusal does not name the version: {told}")
        await serves(t, t.versions[2])
    return f"{beyond.name} held: {told[:120]}"
