"""The terms of the weight map: topologies, places of ranks in them, and what a rank's tensors are made of. Pure.

Everything is told in elements of the checkpoint's tensors: a rank's tensor is a set of blocks of them, each with
the place where it begins in the rank's own tensor, and of padding. A block is one (first, count) per axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

from turnout.core.errors import WeightError

Block = tuple[tuple[int, int], ...]
Share = tuple[int, int]  # (index, how many) of a rank in a group that divides something
ALL: Share = (0, 1)
MEGATRON_VOCAB, SGLANG_VOCAB = 128, 64  # rows that each side pads its vocabulary to, per its own rule


@dataclass(frozen=True)
class Param:
    """One tensor of the checkpoint, as its safetensors header tells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A checkpoint's tensors and the numbers of its config.json that decide how they are divided."""

    params: tuple[Param, ...]
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    tied: bool = False


@dataclass(frozen=True)
class Part:
    """`block` of the checkpoint's tensor `name`; it begins at `at` in the rank's tensor, which may have more
    (leading) axes, of count 1 here."""

    name: str
    block: Block
    at: tuple[int, ...]

    @property
    def place(self) -> Block:
        """The block of the rank's tensor that it fills."""
        counts = [count for _, count in self.block]
        counts = [1] * (len(self.at) - len(counts)) + counts[max(0, len(counts) - len(self.at)) :]
        return tuple(zip(self.at, counts))

    def within(self, block: Block) -> Block:
        """Where this block of the checkpoint's tensor, which lies in the part, is in the rank's tensor."""
        moved = [(at - first, count) for (at, count), (first, _) in zip(block, self.block)]
        moved = [(0, 1)] * (len(self.at) - len(moved)) + moved[max(0, len(moved) - len(self.at)) :]
        return tuple((at + first, count) for at, (first, count) in zip(self.at, moved))


@dataclass(frozen=True)
class Local:
    """One tensor of one rank. `shares`: the tensor whose memory it is (then it has no parts of its own). A scale of
    a quantised tensor has `scales`, that tensor's name, in place of parts: it is computed, not moved."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    padding: tuple[Block, ...] = ()
    shares: str = ""
    scales: str = ""


@dataclass(frozen=True)
class Problem:
    """What does not fit, and what comes nearest to it."""

    where: str
    reason: str
    nearest: tuple[str, ...] = ()

    def line(self) -> str:
        near = f"; nearest: {', '.join(self.nearest)}" if self.nearest else ""
        return f"{self.where}: {self.reason}{near}"


@dataclass(frozen=True)
class Seat:
    """Which share of each kind of tensor one rank has. `experts` are dealt out whole, `expert` divides each of
    them; `rows` and `expert_rows` divide what is left along its first axis (FSDP)."""

    stage: Share = ALL
    attention: Share = ALL
    mlp: Share = ALL
    embedding: Share = ALL
    head: Share = ALL
    experts: Share = ALL
    expert: Share = ALL
    rows: Share = ALL
    expert_rows: Share = ALL


@dataclass(frozen=True)
class TrainTopology:
    """The trainer's ranks, numbered as in Megatron-core ("tp-cp-ep-dp-pp": tp fastest, pp slowest). cp and, unless
    `fsdp`, dp hold replicas. `etp` ranks share an expert; None: tp without ep, else 1. `layout`: `transformers`
    (names of its modules, experts stacked) or `megatron`. `untie` and `dtype` as for engines."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    layout: str = "transformers"
    fsdp: bool = False
    untie: bool = False
    dtype: str = ""

    @property
    def expert_tp(self) -> int:
        if self.etp is not None:
            return self.etp
        return self.tp if self.ep == 1 else 1

    def faults(self) -> list[Problem]:
        found = _sizes(
            self, "trainer", ("dp", "tp", "pp", "cp", "ep", "expert_tp"), ("transformers", "megatron")
        )
        stage = self.dp * self.tp * self.cp
        if not found and stage % (self.ep * self.expert_tp):
            why = f"ep {self.ep} x etp {self.expert_tp} does not divide dp x cp x tp = {stage}"
            found.append(Problem("trainer", why))
        return found

    def padded(self, vocabulary: int) -> int:
        return _up(vocabulary, MEGATRON_VOCAB * self.tp) if self.layout == "megatron" else vocabulary

    def seats(self) -> list[Seat]:
        stage, expert_ranks = self.dp * self.tp * self.cp, self.ep * self.expert_tp
        found = []
        for rank in range(stage * self.pp):
            inner, tp = rank % stage, (rank % self.tp, self.tp)
            found.append(
                Seat(
                    (rank // stage, self.pp), tp, tp, tp, tp,
                    (inner // self.expert_tp % self.ep, self.ep), (inner % self.expert_tp, self.expert_tp),
                    (inner // self.tp, stage // self.tp) if self.fsdp else ALL,
                    (inner // expert_ranks, stage // expert_ranks) if self.fsdp else ALL,
                )
            )  # fmt: skip
        return found


@dataclass(frozen=True)
class RolloutTopology:
    """Engines that are all alike. With `dp` above 1 (DP-attention) attention is divided over tp / dp ranks and
    replicated; `ep` divides tp. `layout`: `checkpoint` (our engine: its names, nothing fused or padded) or
    `sglang` (0.5.23: fused projections, stacked experts, a padded vocabulary; vLLM's are the same). `untie`: a head
    of its own in a tied model. `dtype`: of all floats but routers; empty: the checkpoint's. `block`: rows and
    columns of one scale where matrices are block-quantised."""

    engines: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    layout: str = "checkpoint"
    untie: bool = False
    dtype: str = ""
    block: tuple[int, int] | None = None

    def faults(self) -> list[Problem]:
        found = _sizes(self, "engine", ("engines", "tp", "pp", "dp", "ep"), ("checkpoint", "sglang"))
        if found:
            return found
        return [
            Problem("engine", f"{name} {size} does not divide tp {self.tp}")
            for name, size in (("dp", self.dp), ("ep", self.ep))
            if self.tp % size
        ]

    def padded(self, vocabulary: int) -> int:
        """SGLang pads to 64 rows, and to 64 x ranks where those would not divide."""
        if self.layout != "sglang":
            return vocabulary
        padded = _up(vocabulary, SGLANG_VOCAB)
        return padded if padded % self.tp == 0 else _up(vocabulary, SGLANG_VOCAB * self.tp)

    def seats(self) -> list[Seat]:
        """Of one engine."""
        found = []
        attention, expert_tp = self.tp // self.dp, self.tp // self.ep
        for rank in range(self.tp * self.pp):
            t = rank % self.tp
            tp, near = (t, self.tp), (t % attention, attention)
            experts, expert = (t // expert_tp, self.ep), (t % expert_tp, expert_tp)
            found.append(Seat((rank // self.tp, self.pp), near, tp, near, tp, experts, expert))
        return found


T = TypeVar("T", TrainTopology, RolloutTopology)


def volume(block: Block) -> int:
    return math.prod(count for _, count in block)


def overlap(left: Block, right: Block) -> Block | None:
    """What two blocks of one tensor have in common; None: nothing."""
    found = []
    for (a, n), (b, m) in zip(left, right):
        first, end = max(a, b), min(a + n, b + m)
        if first >= end:
            return None
        found.append((first, end - first))
    return tuple(found)


def contiguous(block: Block, shape: tuple[int, ...]) -> bool:
    """Whether the block's elements lie one after another in a dense tensor of this shape."""
    inner = next((axis for axis, (_, count) in enumerate(block) if count != 1), len(block))
    return all(count == side for (_, count), side in zip(block[inner + 1 :], shape[inner + 1 :]))


def whole(shape: tuple[int, ...]) -> Block:
    return tuple((0, side) for side in shape)


def tiling_fault(shape: tuple[int, ...], blocks: list[Block]) -> str | None:
    """Why the blocks do not cover a tensor of this shape exactly once; None where they do."""
    around = whole(shape)
    if any(b and overlap(b, around) != b for b in blocks if volume(b)):
        return "a block lies outside"
    live: list[Block] = []
    for block in sorted(b for b in blocks if volume(b)):
        live = [b for b in live if not block or b[0][0] + b[0][1] > block[0][0]]
        twice = next((b for b in live if overlap(b, block) is not None), None)
        if twice is not None:
            return f"covered twice: {show(twice)} and {show(block)}"
        live.append(block)
    missing = math.prod(shape) - sum(volume(b) for b in blocks)
    return f"{missing} elements are not covered" if missing else None


def show(block: Block) -> str:
    return "[" + ", ".join(f"{first}:{first + count}" for first, count in block) + "]"


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _sizes(
    topology: TrainTopology | RolloutTopology, where: str, names: tuple[str, ...], layouts: tuple[str, ...]
) -> list[Problem]:
    sizes = {name: getattr(topology, name) for name in names}
    found = [Problem(where, f"{name} {size} must be at least 1") for name, size in sizes.items() if size < 1]
    if topology.layout not in layouts:
        found.append(Problem(where, f"layout {topology.layout} is not known", layouts))
    return found


def parse(text: str, base: T) -> T:
    """`base` with other sizes, from `tp=2,pp=1,layout=sglang`; `block=128x128`. Raises WeightError for an unknown
    name or a value that is none."""
    values: dict[str, object] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in base.__dataclass_fields__:
            raise WeightError(f"{item}: no such size; there are {', '.join(base.__dataclass_fields__)}")
        if name == "block":
            rows, _, columns = value.partition("x")
            values[name] = (_count(rows, item), _count(columns, item))
        elif name in ("layout", "dtype"):
            values[name] = value
        else:
            values[name] = _count(value, item)
    return replace(base, **values)


def _count(text: str, item: str) -> int:
    if not text.isdecimal():
        raise WeightError(f"{item}: {text!r} is no whole number")
    return int(text)
