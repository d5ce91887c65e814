"""Reads what an engine says of itself, under the names of several versions of its API, and what its model's
folder says; measures the time of a decode step once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnout.bench.replies import lacks, rows
from turnout.bench.target import Facts, Target
from turnout.core.errors import ConfigError, Fault
from turnout.serving.exchange import Exchange

PROBE_TOKENS = 24
PROBES = 5
RUNNING_DEFAULT = 1 << 20


async def info(wire: Exchange, name: str) -> dict[str, Any]:
    """/<name>, or under its old name /get_<name>."""
    answer = await wire.get(f"/{name}")
    return rows(await wire.get(f"/get_{name}") if lacks(answer) else answer)


async def read_facts(wire: Exchange, folder: Path | None) -> tuple[Facts, Path]:
    """The facts and the model's folder (the one given, else the one that the engine names). Raises
    ConfigError where that folder cannot be read here."""
    server, model = await info(wire, "server_info"), await info(wire, "model_info")
    found = folder if folder is not None else Path(str(model.get("model_path", "")))
    try:
        config = json.loads((found / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        reason = f"the engine's model cannot be read: {fault}"
        raise ConfigError(Fault("--model", str(found), reason, "name the checkpoint folder")) from fault
    dtype = str(server.get("dtype") or "auto")
    if dtype in ("auto", "half"):
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    context = server.get("context_length") or config.get("max_position_embeddings")
    running = server.get("max_running_requests")
    facts = Facts(
        context=min(int(context), int(server.get("max_total_num_tokens") or context)),
        vocabulary=int(config["vocab_size"]),
        eos_ids=_ids(config.get("eos_token_id")),
        dtype=dtype,
        label=str(model.get("weight_version")),
        max_running=int(running) if running is not None else RUNNING_DEFAULT,
        ours=server.get("engine") == "turnout",
        tp=int(server.get("tp_size") or 1),
        pid=_process_here(wire, server.get("pid")),
    )
    return facts, found


async def measured_token_s(target: Target) -> float:
    """Seconds of one decode step of a single request, once the engine is warm; the fastest of several, since
    checks rely on requests that are not over sooner."""
    taken: list[float] = []
    for _ in range(PROBES):
        begun = target.clock.now()
        await target.generate(target.prompt(1), PROBE_TOKENS)
        taken.append((target.clock.now() - begun) / PROBE_TOKENS)
    return min(taken)


def _process_here(wire: Exchange, pid: Any) -> int:
    """The engine's process id where it names one that this host shows; 0 otherwise."""
    known = isinstance(pid, int) and wire.address.loopback and Path(f"/proc/{pid}/status").is_file()
    return int(pid) if known else 0


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else () if value is None else (int(value),)
