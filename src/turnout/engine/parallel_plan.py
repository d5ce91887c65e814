"""Which part of each checkpoint tensor a rank of a sharded engine holds. Pure; no torch.

The split is Megatron's: the projections into a layer by output rows, those out of it by input columns, the
vocabulary (embedding and head) by rows, experts by whole experts over `ep` groups and inside a group like any
other layer; norms, routers and output biases are whole on every rank. Promises: the pieces of all ranks cover each
tensor exactly once, or each rank has the whole of it; a model that does not divide is refused with its numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from turnout.core.errors import Fault, InvariantBroken

EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.((?:gate|up|down)_proj\.weight)$")
ROWS = re.compile(
    r"(?:\.[qkv]_proj|\.gate_proj|\.up_proj)\.(?:weight|bias)$|(?:embed_tokens|lm_head)\.weight$"
)
COLUMNS = re.compile(r"\.(?:o|down)_proj\.weight$")
WHOLE = re.compile(r"norm\.weight$|\.mlp\.gate\.weight$|\.(?:o|down)_proj\.bias$")


VICTIM_STATUS = 75  # a rank ends with it where it waited for another one in vain


@dataclass(frozen=True)
class RankReport:
    """One rank: its process, and the bytes of its part of the weights and of its KV cache."""

    rank: int
    pid: int
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Place:
    """One rank of `tp`; `ep` divides tp, and `experts` (0: a model without) is divided by ep."""

    rank: int
    tp: int
    ep: int = 1
    experts: int = 0

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.tp // self.ep

    @property
    def experts_here(self) -> int:
        return self.experts // self.ep

    @property
    def first_expert(self) -> int:
        return self.rank // self.expert_tp * self.experts_here


@dataclass(frozen=True)
class Piece:
    """`count` lines from `first` on along `axis`; axis None: the whole tensor, on every rank alike."""

    axis: int | None
    first: int = 0
    count: int = 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        if self.axis is None:
            return whole
        return (*whole[: self.axis], self.count, *whole[self.axis + 1 :])


@dataclass(frozen=True)
class Sizes:
    """The numbers of a model that a split must divide, by their names in config.json; 0 or absent: not there."""

    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    intermediate_size: int = 0
    num_experts: int = 0
    moe_intermediate_size: int = 0


def piece(name: str, shape: tuple[int, ...], place: Place) -> Piece | None:
    """What `place` holds of the tensor with this name in a checkpoint; None: nothing (another rank's expert)."""
    expert = EXPERT.match(name)
    if expert is not None:
        if not 0 <= int(expert[2]) - place.first_expert < place.experts_here:
            return None
        axis = 1 if expert[3].startswith("down") else 0
        return _part(axis, shape, place.rank % place.expert_tp, place.expert_tp)
    if ROWS.search(name):
        return _part(0, shape, place.rank, place.tp)
    if COLUMNS.search(name):
        return _part(1, shape, place.rank, place.tp)
    if WHOLE.search(name):
        return Piece(None)
    raise InvariantBroken(f"no rule says how {name} is divided over ranks")


def local_name(name: str, place: Place) -> str:
    """The name inside a module that holds only this rank's experts, numbered from 0."""
    expert = EXPERT.match(name)
    if expert is None:
        return name
    return f"{expert[1]}.{int(expert[2]) - place.first_expert}.{expert[3]}"


def faults(sizes: Sizes, tp: int, ep: int) -> list[Fault]:
    """Everything of a model that `tp` and `ep` do not divide."""
    found = []
    if ep > 1 and not sizes.num_experts:
        found.append(Fault("ep_size", str(ep), "the model has no experts", "leave ep_size at 1"))
    split = {"num_attention_heads": tp, "num_key_value_heads": tp, "vocab_size": tp, "intermediate_size": tp}
    split["moe_intermediate_size"] = tp // ep
    wrong = [f"{n} = {getattr(sizes, n)}" for n, ranks in split.items() if getattr(sizes, n) % ranks]
    if wrong:
        found.append(
            Fault("tp_size", f"{tp} (ep_size {ep})", f"does not divide the model's {', '.join(wrong)}")
        )
    if sizes.num_experts % ep:
        found.append(
            Fault("ep_size", str(ep), f"does not divide the model's num_experts = {sizes.num_experts}")
        )
    return found


def _part(axis: int, shape: tuple[int, ...], index: int, parts: int) -> Piece:
    count = shape[axis] // parts
    return Piece(axis, index * count, count)
