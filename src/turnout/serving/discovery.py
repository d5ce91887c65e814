"""What an engine that somebody else runs is, asked of itself: /server_info and /model_info, under all their names.

Promises: numbers may come as text, under old names, or one level down; an engine that serves another model than the
run trains, in another dtype, or half of a pair without its port, is refused with what it has and what the run has;
what may differ (cache sizes, ports, ranks, log levels) is not compared. Which weights it holds is proved later, by
its attestation. Shapes: SGLang 0.5.23 (srt/entrypoints/http_server.py), and the embedded engine's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.core.errors import Fault
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.serving.roster import WorkerType

FLAG = "--rollout-external-engine-addrs"
OURS = "turnout"
NESTED = ("server_args", "parallel_config")


@dataclass(frozen=True)
class ModelIdentity:
    """What names a model besides its weights. Empty or None: not known."""

    model_type: str = ""
    architectures: tuple[str, ...] = ()
    vocab_size: int | None = None

    @classmethod
    def of_folder(cls, checkpoint: Path) -> ModelIdentity:
        """Of a checkpoint folder."""
        return cls.of_row(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> ModelIdentity:
        names = row.get("architectures")
        size = row.get("vocab_size")
        return cls(
            str(row.get("model_type") or ""),
            tuple(map(str, names)) if isinstance(names, list) else (),
            size if isinstance(size, int) else None,
        )

    def differences(self, other: ModelIdentity) -> Iterator[tuple[str, object, object]]:
        """Name, own and other value of each thing that both know and that differs."""
        for name in ("model_type", "architectures", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine not in ("", (), None) and theirs not in ("", (), None) and mine != theirs:
                yield name, mine, theirs


@dataclass(frozen=True)
class EngineInfo:
    """One engine as it says itself. `ours`: an embedded engine, else an SGLang; `program` is its name and version.
    `tp`, `pp`, `dp`, `ep` are its sizes, `dp_attention` whether its ranks split attention by request. `identity` is
    that of the process, the same under every address of it and another after a restart; empty: not told.
    `model_path`: the checkpoint that it was started with, on its host."""

    address: Address
    ours: bool
    program: str
    identity: str
    tp: int
    pp: int
    dp: int
    ep: int
    dp_attention: bool
    mode: str
    bootstrap_port: int | None
    dtype: str
    device: str
    model_path: str
    model: ModelIdentity

    @property
    def ranks(self) -> int:
        """Devices; ranks of data-parallel attention are among them."""
        return self.tp * self.pp

    @property
    def worker_type(self) -> WorkerType:
        """Of an engine that `faults` has nothing against."""
        return WorkerType.REGULAR if self.mode in ("", "null") else WorkerType(self.mode)

    def faults(self, dtype: str, model: ModelIdentity, stock: Iterable[Fault] = ()) -> Iterator[Fault]:
        """What keeps the engine from serving a run that trains this model in this dtype. `stock`: what the run asks
        that no SGLang does."""
        where = self.address.place
        for asked in () if self.ours else stock:
            reason = f"{where} is {self.program}: {asked.reason}"
            yield Fault(asked.where, asked.value, reason, asked.remedy)
        if self.dtype != dtype:
            reason = f"has the dtype {self.dtype or 'unknown'}, the run trains in {dtype}"
            yield Fault(FLAG, where, reason, f"start it with --dtype {dtype}")
        for name, mine, theirs in self.model.differences(model):
            reason = f"serves another model: its {name} is {mine}, that of --hf-checkpoint {theirs}"
            yield Fault(FLAG, where, reason, "start it with the run's checkpoint")
        if self.mode not in ("", "null", "prefill", "decode"):
            yield Fault(FLAG, where, f"is a {self.mode} worker, which no run of ours uses", "leave it out")
        if self.mode == "prefill" and self.bootstrap_port is None:
            reason = "is a prefill worker and names no bootstrap port, so that no decode worker reaches it"
            yield Fault(FLAG, where, reason, "start it with --disaggregation-bootstrap-port")


class NotUnderstood(ValueError):
    """What answered is no engine that we know."""


async def ask(client: EngineClient, deadline_s: float) -> EngineInfo:
    """What the engine at the client's address says of itself. Raises EngineError, NotUnderstood."""
    info = await client.server_info(deadline_s)
    return info_of(client.address, info, await client.model_info(deadline_s))


def info_of(address: Address, info: Any, model: Any) -> EngineInfo:
    """From the two answers; raises NotUnderstood that says what came."""
    if not isinstance(info, dict) or not isinstance(model, dict):
        raise NotUnderstood(f"{address.place} answers, but not as SGLang does: {str(info)[:200]}")
    row: dict[str, Any] = dict(info)
    for name in NESTED:
        inner = info.get(name)
        row |= (
            {key: value for key, value in inner.items() if key not in row} if isinstance(inner, dict) else {}
        )
    ours = row.get("engine") == OURS
    if not ours and "model_path" not in row and "tp_size" not in row:
        shape = ", ".join(sorted(map(str, row))[:8])
        raise NotUnderstood(f"{address.place} answers, but not as SGLang does: it has the fields {shape}")
    mode = "encoder" if row.get("encoder_only") else str(row.get("disaggregation_mode") or "null")
    return EngineInfo(
        address=address,
        ours=ours,
        program=str(row.get("version", "unknown")) if ours else f"sglang-{row.get('version', 'unknown')}",
        identity=identity_of(row, ours),
        tp=_number(row, "tp_size", "tensor_parallel_size", "tp"),
        pp=_number(row, "pp_size", "pipeline_parallel_size", "pp"),
        dp=_number(row, "dp_size", "data_parallel_size", "dp"),
        ep=_number(row, "ep_size", "expert_parallel_size", "ep"),
        dp_attention=bool(row.get("enable_dp_attention")),
        mode=mode,
        bootstrap_port=_port(row.get("disaggregation_bootstrap_port")) if mode == "prefill" else None,
        dtype=str(row.get("dtype") or "").removeprefix("torch."),
        device=str(row.get("device") or ""),
        model_path=str(row.get("model_path") or ""),
        model=ModelIdentity.of_row({**row, **model}),
    )


def _number(row: Mapping[str, Any], *names: str) -> int:
    """The first of these that is there, 1 where none is."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 1


def _port(value: object) -> int | None:
    found = int(value) if isinstance(value, str) and value.isdigit() else value
    return found if isinstance(found, int) and 0 < found < 65536 else None


def identity_of(row: Mapping[str, Any], ours: bool) -> str:
    """See EngineInfo. A process of SGLang is known by how long each part of its start took."""
    marks = ("engine_id", "pid", "started_at") if ours else ("startup_time", "random_seed", "port")
    if any(row.get(name) is None for name in marks):
        return ""
    return json.dumps([row[name] for name in marks], sort_keys=True, default=str)
