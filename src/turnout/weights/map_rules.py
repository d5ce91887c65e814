"""Which tensors of a checkpoint are divided over ranks, and how. The one place that knows it; pure, no torch.

The split is Megatron's: the projections into a layer by output rows, those out of it by input columns, the
vocabulary (embedding and head) by rows, experts whole over groups of ranks and inside a group like any other
layer; norms, routers and output biases are whole on every rank. `piece` is what our engine's ranks hold; the
weight map (turnout.weights.map) applies the same table to any other topology. Promises: the pieces of all ranks
cover each tensor exactly once, or each rank has the whole of it; a name without a rule is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from turnout.core.errors import InvariantBroken
from turnout.weights.map_types import Block

EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.((?:gate|up|down)_proj\.weight)$")
LAYER = re.compile(r"\.layers\.(\d+)\.")
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
ROUTER = "router"
DERIVED = "derived"  # computed from the config by whoever needs it


@dataclass(frozen=True)
class Rule:
    """`group`: the share of a Seat that divides the tensor along `axis`; axis None: whole on every rank."""

    kind: str
    group: str
    axis: int | None
    pattern: re.Pattern[str]


def _rule(kind: str, group: str, axis: int | None, pattern: str) -> Rule:
    return Rule(kind, group, axis, re.compile(pattern))


RULES = (
    _rule("expert in", "expert", 0, r"\.experts\.\d+\.(?:gate|up)_proj\.weight$"),
    _rule("expert out", "expert", 1, r"\.experts\.\d+\.down_proj\.weight$"),
    _rule(ROUTER, "", None, r"\.(?:gate|router)\.(?:weight|bias|e_score_correction_bias)$"),
    _rule(ROUTER, "", None, r"\.shared_expert_gate\.weight$"),
    _rule("query", "attention", 0, r"\.q_(?:b_)?proj\.(?:weight|bias)$"),
    _rule("key, value", "attention", 0, r"\.[kv]_proj\.(?:weight|bias)$"),
    _rule("latent", "", None, r"\.(?:q_a_proj|kv_a_proj_with_mqa)\.(?:weight|bias)$"),
    _rule("query", "attention", 0, r"\.kv_b_proj\.weight$"),
    _rule("attention out", "attention", 1, r"\.o_proj\.weight$"),
    _rule("mlp in", "mlp", 0, r"\.(?:gate|up)_proj\.(?:weight|bias)$"),
    _rule("mlp out", "mlp", 1, r"\.down_proj\.weight$"),
    _rule("output bias", "", None, r"\.(?:o|down)_proj\.bias$"),
    _rule("embedding", "embedding", 0, r"(?:^|\.)embed_tokens\.weight$"),
    _rule("head", "head", 0, r"(?:^|\.)lm_head\.weight$"),
    _rule("norm", "", None, r"norm\.(?:weight|bias)$"),
    _rule(DERIVED, "", None, r"rotary_emb\.inv_freq$"),
)


def rule_of(name: str) -> Rule | None:
    """None: no rule knows this name."""
    return next((rule for rule in RULES if rule.pattern.search(name)), None)


def nearest(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names most like this one; of equals, those of the same layer first."""
    return tuple(difflib.get_close_matches(name, list(known), n=3, cutoff=0.6))


def even(count: int, index: int, size: int) -> tuple[int, int]:
    """(first, count) of one of `size` equal shares."""
    return index * (count // size), count // size


@dataclass(frozen=True)
class Place:
    """One rank of `tp` of our engine; `ep` divides tp, and `experts` (0: a model without) is divided by ep."""

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
        return tuple(count for _, count in self.block(whole))

    def block(self, whole: tuple[int, ...]) -> Block:
        full = [(0, side) for side in whole]
        if self.axis is not None:
            full[self.axis] = (self.first, self.count)
        return tuple(full)


def piece(name: str, shape: tuple[int, ...], place: Place) -> Piece | None:
    """What `place` holds of the tensor with this name in a checkpoint; None: nothing (another rank's expert)."""
    rule = rule_of(name)
    if rule is None or rule.kind == DERIVED:
        raise InvariantBroken(f"no rule says how {name} is divided over ranks")
    if rule.axis is None:
        return Piece(None)
    if rule.group != "expert":
        return Piece(rule.axis, *even(shape[rule.axis], place.rank, place.tp))
    expert = EXPERT.match(name)
    if expert is None or not 0 <= int(expert[2]) - place.first_expert < place.experts_here:
        return None
    return Piece(rule.axis, *even(shape[rule.axis], place.rank % place.expert_tp, place.expert_tp))


def local_name(name: str, place: Place) -> str:
    """The name inside a module that holds only this rank's experts, numbered from 0."""
    expert = EXPERT.match(name)
    if expert is None:
        return name
    return f"{expert[1]}.{int(expert[2]) - place.first_expert}.{expert[3]}"
