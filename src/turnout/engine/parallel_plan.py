"""What a sharded engine's ranks need a model to be, and what each says of itself. Pure; no torch.

Which part of each tensor a rank holds is told by turnout.weights.map_rules. Promises: a model that does not divide
is refused with its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnout.core.errors import Fault

VICTIM_STATUS = 75  # a rank ends with it where it waited for another one in vain


@dataclass(frozen=True)
class RankReport:
    """One rank: its process, and the bytes of its part of the weights and of its KV cache."""

    rank: int
    pid: int
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Sizes:
    """The numbers of a model that a split must divide, by their names in config.json; 0 or absent: not there."""

    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    intermediate_size: int = 0
    num_experts: int = 0
    moe_intermediate_size: int = 0


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
