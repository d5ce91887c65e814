"""Where the halves can lie, and whether they fit there: every layout with its memory by part. Pure.

What a trainer holds per parameter is this one's (turnout.train.parameters): float32 master, gradient and two
moments, 16 bits to compute with, all divided over its devices. An engine's weights are divided over its ranks;
it keeps a second set while a version is brought to it other than by handle. Promises: more memory never makes a
layout unfit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from turnout.plan.cluster import GB, Cluster
from turnout.plan.shapes import ModelShape

Kind = Literal["time-sliced", "resident", "disaggregated"]
STATE_BYTES = 16  # master, gradient, moments of one parameter
COPY_BYTES = 2
USABLE = 0.92  # of a device's memory; the rest is fragments and the driver's
OVERHEAD = {True: 0.4 * GB, False: 2.0 * GB}  # of a process, by whether a device is a core
HALVES = ("trainer", "engine")


@dataclass(frozen=True)
class Work:
    """What a step is made of. `lengths` are response tokens of a sample of responses, `prompt` the mean of prompts;
    `micro` tokens are computed at a time by a trainer's device, `head` of them have logits. `running`: most
    requests of an engine at once. `reference`: the trainer holds a frozen copy besides."""

    shape: ModelShape
    lengths: tuple[int, ...]
    prompt: float
    groups: int
    samples: int
    micro: int = 2048
    head: int = 512
    checkpointing: bool = False
    running: int = 64
    reference: bool = False

    @property
    def responses(self) -> int:
        return self.groups * self.samples

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def tokens(self) -> float:
        """That a train step computes: prompts once a group, as they are packed here."""
        return self.responses * self.mean + self.groups * self.prompt

    @property
    def longest(self) -> int:
        return max(self.lengths) + int(self.prompt)


@dataclass(frozen=True)
class Layout:
    """`train` devices of the trainer; `engines` of `tp` devices each; on the same devices unless `disaggregated`.
    `site`: where the engines are, if not beside the trainer."""

    kind: Kind
    train: int
    engines: int
    tp: int
    site: str = ""

    @property
    def rollout(self) -> int:
        return self.engines * self.tp

    @property
    def name(self) -> str:
        place = f" at {self.site}" if self.site else ""
        return f"{self.kind}: trainer on {self.train}, {self.engines} x {self.tp} for engines{place}"

    def sharing(self, cluster: Cluster) -> float:
        """How many times as long a half takes while both compute."""
        if self.kind == "time-sliced":
            return 1.0
        if cluster.cores:
            return max(1.0, (self.train + self.rollout) / cluster.devices)
        return 2.0 if self.kind == "resident" else 1.0


@dataclass(frozen=True)
class Fit:
    """Bytes of one device by part, and what they leave: `kv_tokens` of one engine and `lanes` of its requests at
    once. `why` says what does not fit; empty: all does."""

    trainer: dict[str, float] = field(default_factory=dict[str, float])
    engine: dict[str, float] = field(default_factory=dict[str, float])
    kv_tokens: int = 0
    lanes: int = 0
    why: str = ""


def trainer_bytes(work: Work, devices: int, cores: bool = False) -> dict[str, float]:
    """Of each of so many devices; of all where devices are cores, which are one process."""
    shape, ranks = work.shape, 1 if cores else devices
    parts = {
        "optimizer and gradients": STATE_BYTES * shape.params / ranks,
        "weights": COPY_BYTES * shape.params / ranks,
        "gathered layers": 2 * COPY_BYTES * shape.layer_params if ranks > 1 else 0.0,
        "activations": float(shape.activation_bytes(work.checkpointing) * max(work.micro, work.longest)),
        "logits": 8.0 * work.head * shape.vocab,
        "overhead": OVERHEAD[cores],
    }
    if work.reference:
        parts["reference"] = COPY_BYTES * shape.params / ranks
    return parts


def engine_bytes(work: Work, tp: int, staged: bool, cores: bool = False) -> dict[str, float]:
    """Of each rank, without KV."""
    ranks = 1 if cores else tp
    weights = COPY_BYTES * work.shape.params / ranks
    return {
        "weights": weights,
        "weights on their way": weights if staged else min(weights, 0.5 * GB),
        "overhead": OVERHEAD[cores],
    }


def fit(work: Work, layout: Layout, cluster: Cluster, staged: bool) -> Fit:
    """Whether both halves have room, and how much KV is left."""
    trainer = trainer_bytes(work, layout.train, cluster.cores)
    engine = engine_bytes(work, layout.tp, staged, cluster.cores)
    room = USABLE * cluster.memory
    if cluster.cores:  # one memory for all processes
        room *= cluster.devices
        both = [sum(trainer.values()), sum(engine.values()) * layout.engines]
        held, free = _left(layout.kind, room, both[0], both[1])
        per_engine, most = free / layout.engines, "this machine"
    else:
        both = [sum(trainer.values()), sum(engine.values())]
        held, free = _left(layout.kind, room, both[0], both[1])
        per_engine, most = free * min(layout.tp, work.shape.kv_heads), "a device"
    if held:
        need = " and ".join(f"{half} {size / GB:.1f} GB" for half, size in zip(HALVES, both) if half in held)
        return Fit(trainer, engine, why=f"{need} do not fit in the {room / GB:.1f} GB of {most}")
    tokens = int(per_engine / work.shape.kv_bytes)
    if tokens < work.longest:
        why = f"room for {tokens} tokens of KV is left to an engine, the longest sample has {work.longest}"
        return Fit(trainer, engine, tokens, why=why)
    lanes = max(1, min(work.running, int(tokens / (work.prompt + work.mean))))
    shared = min(tokens, work.running * work.longest)
    kv = shared * work.shape.kv_bytes / (1 if cluster.cores else min(layout.tp, work.shape.kv_heads))
    return Fit(trainer, engine | {"KV": float(kv)}, tokens, lanes)


def _left(kind: Kind, room: float, trainer: float, engine: float) -> tuple[str, float]:
    """Which halves do not fit (empty: all do), and the bytes that are left for KV."""
    if kind == "resident":
        free = room - trainer - engine
        return ("trainer and engine" if free <= 0 else "", free)
    lacking = [half for half, size in (("trainer", trainer), ("engine", engine)) if size >= room]
    return " and ".join(lacking), room - engine


def layouts(cluster: Cluster, tps: tuple[int, ...] = ()) -> list[Layout]:
    """All that are looked at: engine sizes that are powers of two of one machine, splits in eighths of the devices
    (in cores: every split)."""
    if cluster.cores:
        return _of_cores(cluster.devices)
    total, wide = cluster.devices, cluster.devices_per_machine
    sizes = tps or tuple(t for t in (1, 2, 4, 8, 16) if t <= wide)
    found: list[Layout] = []
    for tp in sizes:
        if total % tp == 0:
            found += [
                Layout("time-sliced", total, total // tp, tp),
                Layout("resident", total, total // tp, tp),
            ]
        for train in _splits(total, wide):
            if (total - train) // tp:
                found.append(Layout("disaggregated", train, (total - train) // tp, tp))
        found += [
            Layout("disaggregated", total, site.devices // tp, tp, site.name)
            for site in cluster.sites
            if site.devices >= tp
        ]
    return found


def _splits(total: int, wide: int) -> list[int]:
    """Devices of the trainer: in eighths, by whole machines where there are several."""
    unit = wide if total > wide else 1
    return sorted({max(unit, round(total * part / 8 / unit) * unit) for part in range(1, 8)} - {total})


def _of_cores(cores: int) -> list[Layout]:
    """An engine is a process with some cores."""
    engines = [n for n in (1, 2, 4, 8) if n <= cores]
    found = [Layout(kind, cores, n, cores // n) for n in engines for kind in ("time-sliced", "resident")]
    for train in range(1, cores):
        found += [
            Layout("disaggregated", train, n, (cores - train) // n) for n in engines if (cores - train) // n
        ]
    return found
