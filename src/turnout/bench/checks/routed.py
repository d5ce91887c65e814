"""Checks of what an engine tells of a mixture of experts: which of them each position went through.

`return_routed_experts` gives `meta_info.routed_experts`: base64 of int32 [positions, layers, experts of a token],
for every position but the last, from `routed_experts_start_len` on. A model without experts has nothing to tell.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnout.bench.registry import CapabilityAbsent, check, expect
from turnout.bench.replies import Reply, reply_of
from turnout.bench.target import Target

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@check("routed experts")
async def routed_experts_of_every_position(t: Target) -> str:
    """One row for each position but the last, of different experts that the model has; the same rows where the
    prompt comes from the prefix cache, and from where they are asked for."""
    row: dict[str, Any] = json.loads((t.reference.folder / "config.json").read_text())
    experts = next((row[name] for name in EXPERTS if row.get(name)), 0)
    k, layers = int(row.get("num_experts_per_tok", 0)), int(row["num_hidden_layers"])
    prompt = t.prompt(77, 40)
    if not experts:
        answer = await t.ask(prompt, 2, return_routed_experts=True)
        said = answer.status == 200 and reply_of(answer.row).meta.get("routed_experts")
        expect(
            answer.status in (200, 400) and not said, f"a model without experts told {said} ({answer.status})"
        )
        return f"the model has no experts: {answer.status}, and none are told"

    async def told(start: int, positions: int) -> tuple[Reply, NDArray[np.int32]]:
        reply = await t.generate(prompt, 8, return_routed_experts=True, routed_experts_start_len=start)
        text = reply.meta.get("routed_experts")
        if text is None:
            raise CapabilityAbsent("the reply has no routed_experts (SGLang: --enable-return-routed-experts)")
        flat = np.frombuffer(base64.b64decode(text), np.int32)
        wanted = (positions, layers, k)
        expect(
            flat.size == np.prod(wanted),
            f"{flat.size} values, not those of {wanted} positions, layers, experts",
        )
        return reply, flat.reshape(wanted)

    first, whole = await told(0, 47)
    expect(bool(((whole >= 0) & (whole < experts)).all()), f"experts from {whole.min()} to {whole.max()}")
    expect(bool((np.diff(np.sort(whole), axis=-1) > 0).all()), "a position went through one expert twice")
    again, cached = await told(0, 47)
    later, rest = await told(39, 8)
    expect(first.tokens == again.tokens == later.tokens, "the same greedy request has other tokens")
    if t.facts.ours:
        expect(
            np.array_equal(whole, cached) and np.array_equal(whole[39:], rest),
            "other experts the second time",
        )
    return f"{whole.shape} positions, layers, experts; {again.cached_tokens} positions from the cache"
