"""Tiny models whose elements are numbers of their own, and what ranks hold of them by plain NumPy: a second way to
say what turnout.weights.map_layouts says, for tests to compare the two."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from turnout.weights.map_types import Model, Param, RolloutTopology, TrainTopology

Arrays = dict[str, NDArray[np.int64]]
PAD = -1
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HIDDEN, HEAD_DIM, INTER = 8, 4, 12


def tiny(experts: int = 0, tied: bool = False, head: bool = False, layers: int = 2, **sizes: int) -> Model:
    """Two layers, 4 heads, 2 key heads, 100 ids; the router is float32, the rest bfloat16."""
    vocab, heads, keys = sizes.get("vocab", 100), sizes.get("heads", 4), sizes.get("kv_heads", 2)
    shapes: dict[str, tuple[int, ...]] = {EMBED: (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if head or not tied:
        shapes[HEAD] = (vocab, HIDDEN)
    for layer in range(layers):
        to = f"model.layers.{layer}"
        for name, count in (("q", heads), ("k", keys), ("v", keys)):
            shapes[f"{to}.self_attn.{name}_proj.weight"] = (count * HEAD_DIM, HIDDEN)
            shapes[f"{to}.self_attn.{name}_proj.bias"] = (count * HEAD_DIM,)
        shapes[f"{to}.self_attn.o_proj.weight"] = (HIDDEN, heads * HEAD_DIM)
        shapes |= {f"{to}.{n}.weight": (HIDDEN,) for n in ("input_layernorm", "post_attention_layernorm")}
        if experts:
            shapes[f"{to}.mlp.gate.weight"] = (experts, HIDDEN)
        for stem in [f"{to}.mlp.experts.{e}" for e in range(experts)] or [f"{to}.mlp"]:
            shapes |= {f"{stem}.{n}_proj.weight": (INTER, HIDDEN) for n in ("gate", "up")}
            shapes[f"{stem}.down_proj.weight"] = (HIDDEN, INTER)
    params = [Param(n, "F32" if n.endswith("mlp.gate.weight") else "BF16", s) for n, s in shapes.items()]
    return Model(tuple(params), layers, heads, keys, experts, tied)


def numbered(model: Model) -> Arrays:
    """Every element another number; of a tied head, the embedding's."""
    starts = itertools.accumulate((math.prod(p.shape) for p in model.params), initial=0)
    found = {
        p.name: np.arange(at, at + math.prod(p.shape)).reshape(p.shape) for p, at in zip(model.params, starts)
    }
    if model.tied and HEAD in found:
        found[HEAD] = found[EMBED]
    return found


def share(array: NDArray[np.int64], axis: int, index: int, size: int) -> NDArray[np.int64]:
    return np.split(array, size, axis)[index]


def padded(array: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    extra = np.full((rows - len(array), *array.shape[1:]), PAD)
    return np.concatenate([array, extra])


def expert_range(model: Model, index: int, size: int) -> range:
    return range(index * model.experts // size, (index + 1) * model.experts // size)


def engine_rank(model: Model, t: RolloutTopology, rank: int) -> Arrays:
    """One rank's tensors: our engine's under the checkpoint's names, or SGLang's."""
    ck, stage, tp = numbered(model), rank // t.tp, rank % t.tp
    near = (tp % (t.tp // t.dp), t.tp // t.dp)
    ep, etp = (tp // (t.tp // t.ep), t.ep), (tp % (t.tp // t.ep), t.tp // t.ep)
    fused, out = t.layout == "sglang", {}
    multiple = 64 if fused else 1
    rows = -(-len(ck[EMBED]) // multiple) * multiple
    if stage == 0:
        out[EMBED] = share(padded(ck[EMBED], rows), 0, *near)
    if stage == t.pp - 1:
        out["model.norm.weight"] = ck["model.norm.weight"]
        if not model.tied or t.pp > 1:
            out[HEAD] = share(padded(ck.get(HEAD, ck[EMBED]), rows), 0, tp, t.tp)
    for layer in range(stage * model.layers // t.pp, (stage + 1) * model.layers // t.pp):
        to = f"model.layers.{layer}"
        for leaf in ("weight", "bias"):
            q, k, v = (ck[f"{to}.self_attn.{n}_proj.{leaf}"] for n in "qkv")
            parts = [share(q, 0, *near)]
            if near[1] <= model.kv_heads:
                parts += [share(k, 0, *near), share(v, 0, *near)]
            else:  # each head on several ranks
                which = near[0] * model.kv_heads // near[1]
                parts += [share(x, 0, which, model.kv_heads) for x in (k, v)]
            if fused:
                out[f"{to}.self_attn.qkv_proj.{leaf}"] = np.concatenate(parts)
            else:
                out |= {f"{to}.self_attn.{n}_proj.{leaf}": part for n, part in zip("qkv", parts)}
        out[f"{to}.self_attn.o_proj.weight"] = share(ck[f"{to}.self_attn.o_proj.weight"], 1, *near)
        norms = [f"{to}.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")]
        out |= {n: ck[n] for n in norms}
        if not model.experts:
            gate, up = (share(ck[f"{to}.mlp.{n}_proj.weight"], 0, tp, t.tp) for n in ("gate", "up"))
            if fused:
                out[f"{to}.mlp.gate_up_proj.weight"] = np.concatenate([gate, up])
            else:
                out |= {f"{to}.mlp.gate_proj.weight": gate, f"{to}.mlp.up_proj.weight": up}
            out[f"{to}.mlp.down_proj.weight"] = share(ck[f"{to}.mlp.down_proj.weight"], 1, tp, t.tp)
            continue
        out[f"{to}.mlp.gate.weight"] = ck[f"{to}.mlp.gate.weight"]
        w13, w2 = [], []
        for e in expert_range(model, *ep):
            stem = f"{to}.mlp.experts.{e}"
            gate, up = (share(ck[f"{stem}.{n}_proj.weight"], 0, *etp) for n in ("gate", "up"))
            down = share(ck[f"{stem}.down_proj.weight"], 1, *etp)
            w13.append(np.concatenate([gate, up]))
            w2.append(down)
            if not fused:
                out |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
                out[f"{stem}.down_proj.weight"] = down
        if fused:
            out |= {
                f"{to}.mlp.experts.w13_weight": np.stack(w13),
                f"{to}.mlp.experts.w2_weight": np.stack(w2),
            }
    return out


def trainer_rank(model: Model, t: TrainTopology, rank: int) -> Arrays:
    """One rank's tensors: of transformers' modules under FSDP or not, or of Megatron-core."""
    ck, inner = numbered(model), rank % (t.dp * t.tp * t.cp)
    stage, tp = rank // (t.dp * t.tp * t.cp), inner % t.tp
    etp, ep = inner % t.expert_tp, inner // t.expert_tp % t.ep
    layers = range(stage * model.layers // t.pp, (stage + 1) * model.layers // t.pp)
    place = (model, t, ck, tp, (ep, etp))
    out = megatron(*place, layers) if t.layout == "megatron" else modules(*place, layers)
    if stage > 0:
        out = {n: a for n, a in out.items() if "embed" not in n}
    if stage < t.pp - 1:
        drop = ("model.norm", "lm_head", "final_layernorm", "output_layer")
        out = {n: a for n, a in out.items() if not any(d in n for d in drop)}
    elif model.tied and t.pp == 1:
        out = {n: a for n, a in out.items() if "lm_head" not in n and "output_layer" not in n}
    if t.fsdp:
        dense, experts = (inner // t.tp, t.dp * t.cp), (inner // (t.expert_tp * t.ep), 0)
        experts = (experts[0], t.dp * t.cp * t.tp // (t.expert_tp * t.ep))
        for name, array in out.items():
            index, size = experts if ".experts." in name else dense
            lines = -(-len(array) // size)
            out[name] = array[index * lines : (index + 1) * lines]
    return out


def modules(
    model: Model, t: TrainTopology, ck: Arrays, tp: int, expert: tuple[int, int], layers: range
) -> Arrays:
    out = {EMBED: share(ck[EMBED], 0, tp, t.tp), "model.norm.weight": ck["model.norm.weight"]}
    out[HEAD] = share(ck.get(HEAD, ck[EMBED]), 0, tp, t.tp)
    for layer in layers:
        to = f"model.layers.{layer}."
        for name in (n for n in ck if n.startswith(to) and ".experts." not in n):
            axis = 1 if ".o_proj" in name or ".down_proj" in name else 0
            is_whole = "norm" in name or "mlp.gate." in name
            out[name] = ck[name] if is_whole else share(ck[name], axis, tp, t.tp)
        if model.experts:
            ins, outs = [], []
            for e in expert_range(model, expert[0], t.ep):
                gate, up, down = (ck[f"{to}mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))
                ins.append(np.concatenate([share(x, 0, expert[1], t.expert_tp) for x in (gate, up)]))
                outs.append(share(down, 1, expert[1], t.expert_tp))
            out |= {
                f"{to}mlp.experts.gate_up_proj": np.stack(ins),
                f"{to}mlp.experts.down_proj": np.stack(outs),
            }
    return out


def megatron(
    model: Model, t: TrainTopology, ck: Arrays, tp: int, expert: tuple[int, int], layers: range
) -> Arrays:
    rows = -(-len(ck[EMBED]) // (128 * t.tp)) * 128 * t.tp
    out = {"embedding.word_embeddings.weight": share(padded(ck[EMBED], rows), 0, tp, t.tp)}
    out["output_layer.weight"] = share(padded(ck.get(HEAD, ck[EMBED]), rows), 0, tp, t.tp)
    out["decoder.final_layernorm.weight"] = ck["model.norm.weight"]
    for here, layer in enumerate(layers):
        old, to = f"model.layers.{layer}.", f"decoder.layers.{here}."
        attention, mlp = f"{to}self_attention.", f"{to}mlp."
        for leaf in ("weight", "bias"):
            q, k, v = (ck[f"{old}self_attn.{n}_proj.{leaf}"] for n in "qkv")
            group = [x.reshape(model.kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
            mixed = np.concatenate(group, axis=1).reshape(-1, *q.shape[1:])  # query group by query group
            out[f"{attention}linear_qkv.{leaf}"] = share(mixed, 0, tp, t.tp)
        out[f"{attention}linear_qkv.layer_norm_weight"] = ck[f"{old}input_layernorm.weight"]
        out[f"{attention}linear_proj.weight"] = share(ck[f"{old}self_attn.o_proj.weight"], 1, tp, t.tp)
        after = ck[f"{old}post_attention_layernorm.weight"]
        if not model.experts:
            out[f"{mlp}linear_fc1.layer_norm_weight"] = after
            both = [share(ck[f"{old}mlp.{n}_proj.weight"], 0, tp, t.tp) for n in ("gate", "up")]
            out[f"{mlp}linear_fc1.weight"] = np.concatenate(both)
            out[f"{mlp}linear_fc2.weight"] = share(ck[f"{old}mlp.down_proj.weight"], 1, tp, t.tp)
            continue
        out |= {f"{to}pre_mlp_layernorm.weight": after, f"{mlp}router.weight": ck[f"{old}mlp.gate.weight"]}
        for number, e in enumerate(expert_range(model, expert[0], t.ep)):
            gate, up, down = (ck[f"{old}mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            both = [share(x, 0, expert[1], t.expert_tp) for x in (gate, up)]
            out[f"{mlp}experts.linear_fc1.weight{number}"] = np.concatenate(both)
            out[f"{mlp}experts.linear_fc2.weight{number}"] = share(down, 1, expert[1], t.expert_tp)
    return out
