"""What this machine tells: the checkpoint, the folder of versions, devices, proxies, the SGLang that would be
started.

Promises: nothing stays that was not there; nothing of torch or CUDA is loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnout.config.run_config import RunConfig
from turnout.config.sglang_arguments import package_of
from turnout.core.errors import ConfigError, DeadlineExceeded, WeightError
from turnout.core.ports import Clock
from turnout.placement.call_threads import CallThreads
from turnout.placement.processes import PROXY_VARIABLES
from turnout.protocol.folder_probe import probe_file
from turnout.serving.checklist.facts import ModelFacts, StoreFacts
from turnout.serving.checklist.lines import Finding, failed, proved, unknown
from turnout.serving.discovery import ModelIdentity
from turnout.serving.roster import EnginePlan, Program
from turnout.serving.sglang_launcher import find_sglang
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of
from turnout.weights.object_depot import ObjectDepot

CHECKED_SGLANG = "0.5.23"
DIGESTED_BYTES = 16 << 30  # more is read with --deep only


def model_facts(folder: Path, deep: bool) -> ModelFacts:
    """Sizes from the headers of all files; the digest from all bytes, of a large checkpoint with `deep` only."""
    try:
        tensors = list(read_checkpoint(folder))
    except (WeightError, OSError) as fault:
        return ModelFacts(folder, str(fault))
    elements, size = sum(math.prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    root, why = "", f"{size} bytes; --deep reads them"
    if deep or size <= DIGESTED_BYTES:
        root, why = root_of(tensors), ""
    return ModelFacts(folder, why, elements, ModelIdentity.of_row(_config(folder)), root)


def _config(folder: Path) -> dict[str, Any]:
    """config.json; empty where there is none."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def store_facts(folder: Path) -> Iterator[StoreFacts]:
    """Writes and removes a file. The folder is there inside the block, where it can be made at all; what was
    made of it is removed afterwards, if nothing came into it."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = probe_file(folder, secrets.token_hex(16))
        probe.write_bytes(b"")
        probe.unlink()
        fault = ""
    except OSError as error:
        fault = f"can't be written to: {error.strerror}"
    try:
        yield StoreFacts(folder, fault, _free_bytes(folder))
    finally:
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()


def _free_bytes(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


async def depot_findings(url: str | None, clock: Clock, deadline_s: float) -> tuple[Finding, ...]:
    """Whether the object store takes, gives and forgets a nonce. Empty where there is none."""
    if url is None:
        return ()
    try:
        found = CallThreads("object store").call(lambda: _kept(url))
        return (await clock.within(deadline_s, "the object store to answer", found),)
    except (WeightError, DeadlineExceeded) as fault:
        return (failed(str(fault), url),)


def _kept(url: str) -> Finding:
    depot, key, nonce = ObjectDepot(url), f".turnout-probe-{secrets.token_hex(16)}", secrets.token_hex(16)
    if not depot.create_once(key, nonce.encode()) or depot.read(key) != nonce.encode():
        return failed("a nonce that was written does not come back", url)
    depot.delete([key])
    return proved("a nonce was written, read and removed", url)


async def sglang_findings(
    config: RunConfig, plans: Sequence[EnginePlan], clock: Clock
) -> tuple[Finding, ...]:
    """Whether the SGLang that the run would start is there; nothing of it is run. None for a run that starts
    none."""
    if all(plan.program is not Program.SGLANG for plan in plans):
        return ()
    python = sys.executable if config.sglang_python is None else config.sglang_python
    try:
        await find_sglang(Path(python), clock)
    except ConfigError as fault:
        return (failed(fault.faults[0].reason, python),)
    except DeadlineExceeded as fault:
        return (unknown(str(fault), python),)
    package = package_of(config.sglang_python)
    beside = () if package is None else package.parent.glob("sglang-*.dist-info")
    version = next((path.name.split("-")[1].removesuffix(".dist") for path in beside), "")
    if version == CHECKED_SGLANG:
        return (proved(f"SGLang {version}", python),)
    seen = f"version {version or 'not told'}; this program was checked against SGLang {CHECKED_SGLANG}"
    return (unknown(seen, python),)


def proxies(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the proxy variables that are set."""
    return tuple(
        sorted(name for name in environment if name.lower() in PROXY_VARIABLES and environment[name])
    )
