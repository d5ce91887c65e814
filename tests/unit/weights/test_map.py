"""The weight map: its layouts against NumPy's, moves of elements that know their place, and what it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.weight_layouts import PAD, engine_rank, numbered, tiny, trainer_rank
from turnout.core.errors import WeightError
from turnout.weights.map import WeightMap, make_map
from turnout.weights.map_plan import Plan, plan
from turnout.weights.map_types import Model, Param, RolloutTopology, TrainTopology, parse

MODELS = {
    "dense": tiny(),
    "tied": tiny(tied=True),
    "tied, head kept": tiny(tied=True, head=True),
    "experts": tiny(experts=2),
}
TRAINERS = [
    TrainTopology(*sizes, layout=layout, fsdp=fsdp)
    for sizes in itertools.product((1, 2), repeat=5)
    for layout, fsdp in (("transformers", False), ("transformers", True), ("megatron", False))
]
ENGINES = [
    RolloutTopology(engines, *sizes, layout=layout)
    for engines in (1, 2)
    for sizes in itertools.product((1, 2), repeat=4)
    for layout in ("checkpoint", "sglang")
]
TRAINERS = [t for t in TRAINERS if not t.faults()]
ENGINES = [t for t in ENGINES if not t.faults()]
FIXED_TRAINERS = [
    TrainTopology(),
    TrainTopology(2, 2, 2, 1, 2, layout="megatron"),
    TrainTopology(2, 2, fsdp=True),
]
FIXED_ENGINES = [
    RolloutTopology(1, 2),
    RolloutTopology(2, 2, 2, 2, 2, layout="sglang"),
    RolloutTopology(1, 4, 1, 2, 1, layout="sglang"),
]


def fits(model: Model, trainer: TrainTopology, rollout: RolloutTopology) -> bool:
    return model.experts > 0 or (trainer.ep, rollout.ep) == (1, 1)


def moved(found: WeightMap, moves: Plan) -> list[list[dict[str, np.ndarray]]]:
    """Every engine's ranks after the plan's moves, from trainer ranks laid out by NumPy."""
    source = [trainer_rank(found.model, found.trainer, rank) for rank in range(len(found.source))]
    made = [
        [{t.name: np.full(t.shape, PAD) for t in rank if not t.shares} for rank in found.target]
        for _ in range(found.rollout.engines)
    ]
    for move in moves.moves:
        data = source[move.source][move.spot.tensor][index(move.spot.block)].reshape(-1)
        for (engine, rank), spot in move.targets:
            into = made[engine][rank][spot.tensor][index(spot.block)]
            assert (into == PAD).all(), "written twice"
            into[...] = data.reshape(into.shape)
    return made


def index(block):
    return tuple(slice(first, first + count) for first, count in block)


def check(model: Model, trainer: TrainTopology, rollout: RolloutTopology) -> None:
    found = make_map(model, trainer, rollout)
    assert found.problems == []
    for rank, locals_ in enumerate(found.source):
        expected = trainer_rank(model, trainer, rank)
        assert {t.name: t.shape for t in locals_ if not t.shares} == {n: a.shape for n, a in expected.items()}
    moves = plan(found, 600)
    for ranks in moved(found, moves):
        for rank, tensors in enumerate(ranks):
            expected = engine_rank(model, rollout, rank)
            assert tensors.keys() == expected.keys()
            assert all(np.array_equal(tensors[name], expected[name]) for name in tensors)
    loads = [size for size in moves.sent.values() if size]
    assert sum(moves.sent.values()) == sum(moves.received.values())
    assert max(loads) < 2 * min(loads) or trainer.fsdp or trainer.pp > 1 or trainer.ep > 1 or trainer.tp > 1


@pytest.mark.parametrize("kind", MODELS)
def test_every_trainer_topology_gives_every_engine_element_its_source(kind):
    model, tried = MODELS[kind], 0
    for trainer, rollout in itertools.product(TRAINERS, FIXED_ENGINES):
        if fits(model, trainer, rollout):
            check(model, trainer, rollout)
            tried += 1
    assert tried >= 80


@pytest.mark.parametrize("kind", MODELS)
def test_every_engine_topology_gets_every_element_from_its_source(kind):
    model, tried = MODELS[kind], 0
    for trainer, rollout in itertools.product(FIXED_TRAINERS, ENGINES):
        if fits(model, trainer, rollout):
            check(model, trainer, rollout)
            tried += 1
    assert tried >= 40


@pytest.mark.parametrize("leaf", ["gate_up_proj", "qkv_proj"])
def test_a_checkpoint_may_be_fused_itself(leaf):
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("q_proj", "k_proj", "v_proj")
    model = tiny()
    params = {param.name: param for param in model.params}
    for name in [n for n in params if f".{parts[0]}." in n]:
        shapes = [params.pop(name.replace(parts[0], part)).shape for part in parts]
        fused = name.replace(parts[0], leaf)
        params[fused] = Param(fused, "BF16", (sum(shape[0] for shape in shapes), *shapes[0][1:]))
    fused_model = replace(model, params=tuple(params.values()))
    trainer, rollout = TrainTopology(1, 2, layout="megatron"), RolloutTopology(1, 2)
    left, right = make_map(model, trainer, rollout), make_map(fused_model, trainer, rollout)
    assert right.problems == []
    separate, together = numbered(model), numbered(fused_model)
    for name in [n for n in together if leaf in n]:
        together[name] = np.concatenate([separate[name.replace(leaf, part)] for part in parts])
    together |= {name: array for name, array in separate.items() if name in together}
    for ours, theirs in zip(left.target, right.target):  # the same elements in the same places
        assert filled(ours, separate).keys() == filled(theirs, together).keys()
        assert all(np.array_equal(a, filled(theirs, together)[n]) for n, a in filled(ours, separate).items())


def test_a_checkpoint_may_have_its_experts_stacked():
    model = tiny(experts=4)
    arrays = numbered(model)
    stacked = {name: array for name, array in arrays.items() if ".experts." not in name}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        each = [[arrays[f"{stem}.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")] for e in range(4)]
        stacked[f"{stem}.gate_up_proj"] = np.stack([np.concatenate([gate, up]) for gate, up, _ in each])
        stacked[f"{stem}.down_proj"] = np.stack([down for *_, down in each])
    dtypes = {param.name: param.dtype for param in model.params}
    params = tuple(Param(n, dtypes.get(n, "BF16"), a.shape) for n, a in stacked.items())
    trainer, rollout = TrainTopology(2, 2, ep=2, fsdp=True), RolloutTopology(1, 2, ep=2, layout="sglang")
    found = make_map(replace(model, params=params), trainer, rollout)
    assert found.problems == []
    for rank in range(2):
        expected = engine_rank(model, rollout, rank)
        got = filled(found.target[rank], stacked)
        assert all(np.array_equal(got[name], expected[name]) for name in expected)
    for rank in range(4):
        expected = trainer_rank(model, trainer, rank)
        got = filled(found.source[rank], stacked)
        assert all(np.array_equal(got[name], expected[name]) for name in expected)


def filled(locals_, arrays) -> dict[str, np.ndarray]:
    made = {}
    for local in locals_:
        made[local.name] = np.full(local.shape, PAD)
        for part in local.parts:
            into = made[local.name][index(part.place)]
            into[...] = arrays[part.name][index(part.block)].reshape(into.shape)
    return made


def test_the_padding_of_the_trainer_is_trimmed_and_that_of_the_engine_is_marked():
    found = make_map(tiny(), TrainTopology(1, 2, layout="megatron"), RolloutTopology(1, 2, layout="sglang"))
    why = "156 rows of padding of the trainer's vocabulary"
    assert found.trimmed == [("embedding.word_embeddings.weight", why), ("output_layer.weight", why)]
    heads = [t for rank in found.target for t in rank if t.name == "lm_head.weight"]
    assert [t.shape[0] for t in heads] == [64, 64] and [t.padding for t in heads] == [
        (),
        (((36, 28), (0, 8)),),
    ]


@pytest.mark.parametrize("head", [False, True])
def test_tied_embeddings_share_memory_or_are_copied(head):
    model = tiny(tied=True, head=head)
    shared = make_map(model, TrainTopology(), RolloutTopology())
    heads = [t for t in shared.target[0] if t.name == "lm_head.weight"]
    assert [t.shares for t in heads] == ["model.embed_tokens.weight"]
    assert ("lm_head.weight", "tied: the same values as the embedding") in shared.trimmed or not head
    untied = make_map(model, TrainTopology(untie=True), RolloutTopology(untie=True))
    for ranks in (untied.source, untied.target):
        (own,) = [t for t in ranks[0] if t.name == "lm_head.weight"]
        assert [part.name for part in own.parts] == ["model.embed_tokens.weight"]
    assert untied.problems == []


def renamed(model: Model, old: str, new: str) -> Model:
    return replace(model, params=tuple(replace(p, name=p.name.replace(old, new)) for p in model.params))


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        (
            renamed(tiny(), "layers.1.mlp.up_proj", "layers.1.mlp.fc1"),
            [
                "mlp.fc1.weight: no rule says where it belongs; nearest: model.layers.1.mlp.up_proj.weight",
                "model.layers.1.mlp.up_proj.weight: is missing; nearest: model.layers.1.mlp.fc1.weight",
            ],
        ),
        (
            renamed(
                tiny(), ".k_proj.weight", ".key.weight"
            ),  # in every layer: no other layer shows that it lacks
            [
                "model.layers.0.self_attn.k_proj.weight: is missing",
                "model.layers.1.self_attn.k_proj.weight: is missing",
            ],
        ),
        (
            renamed(tiny(experts=4), "experts.3.down", "experts.3.dwn"),
            ["experts.3.down_proj.weight: is missing"],
        ),
        (replace(tiny(), layers=3), ["model.layers.2.input_layernorm.weight: is missing"]),
        (replace(tiny(tied=True), tied=False), ["lm_head.weight: is missing"]),
        (
            replace(tiny(), params=(*tiny().params, tiny().params[0])),
            ["model.embed_tokens.weight: comes 2 times"],
        ),
    ],
)
def test_a_name_that_fits_nowhere_is_an_error_with_the_nearest(model, lines):
    told = [problem.line() for problem in make_map(model, TrainTopology(), RolloutTopology()).problems]
    assert told
    for line in lines:
        assert any(line in found for found in told), told


@pytest.mark.parametrize(
    ("trainer", "rollout", "line"),
    [
        (TrainTopology(tp=3), RolloutTopology(), "trainer: 4 attention heads do not divide by 3"),
        (TrainTopology(tp=4), RolloutTopology(), "trainer: 2 key and value heads do not divide by 4"),
        (TrainTopology(), RolloutTopology(tp=4), "engine: 2 key and value heads do not divide by 4"),
        (TrainTopology(ep=2), RolloutTopology(), "trainer: ep 2 x etp 1 does not divide dp x cp x tp = 1"),
        (TrainTopology(), RolloutTopology(tp=2, ep=4), "engine: ep 4 does not divide tp 2"),
        (TrainTopology(), RolloutTopology(tp=2, dp=3), "engine: dp 3 does not divide tp 2"),
        (TrainTopology(pp=3), RolloutTopology(), "trainer: 2 layers do not divide by 3"),
        (TrainTopology(layout="deepspeed"), RolloutTopology(), "trainer: layout deepspeed is not known"),
        (TrainTopology(dp=0), RolloutTopology(), "trainer: dp 0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_problems_with_their_numbers(trainer, rollout, line):
    found = make_map(tiny(experts=4), trainer, rollout)
    assert any(line in problem.line() for problem in found.problems), found.problems


def test_dtypes_are_kept_and_a_router_is_never_rounded():
    found = make_map(tiny(experts=4), TrainTopology(), RolloutTopology(dtype="BF16"))
    (router,) = {t.dtype for t in found.target[0] if t.name.endswith("mlp.gate.weight")}
    assert router == "F32" and found.rounded == []
    wide = replace(tiny(), params=tuple(replace(p, dtype="F32") for p in tiny().params))
    rounded = make_map(wide, TrainTopology(), RolloutTopology(dtype="BF16"))
    assert len(rounded.rounded) == len(wide.params) and rounded.problems == []
    assert {move.dtype for move in plan(found, 1 << 20).moves} == {"BF16", "F32"}  # kept on the wire
    odd = replace(tiny(), params=tuple(replace(p, dtype="I8") for p in tiny().params))
    assert make_map(odd, TrainTopology(), RolloutTopology(dtype="BF16")).problems == []  # integers stay


def test_block_scales_cover_a_matrix_and_are_never_cut():
    fine = make_map(tiny(), TrainTopology(), RolloutTopology(tp=2, block=(2, 2), layout="sglang"))
    assert fine.problems == []
    tensors = {t.name: t for t in fine.target[0]}
    scale = tensors["model.layers.0.mlp.gate_up_proj.weight_scale_inv"]
    assert (scale.shape, scale.dtype, scale.scales) == (
        (6, 4),
        "F32",
        "model.layers.0.mlp.gate_up_proj.weight",
    )
    assert tensors[scale.scales].dtype == "F8_E4M3"
    assert tensors["model.embed_tokens.weight"].dtype == "BF16"
    short = make_map(
        tiny(), TrainTopology(), RolloutTopology(block=(5, 3))
    )  # the last block of each is short
    assert short.problems == [] and {
        t.shape for t in short.target[0] if t.name.endswith("gate_proj.weight_scale_inv")
    } == {(3, 3)}
    cut = make_map(tiny(), TrainTopology(), RolloutTopology(tp=2, block=(4, 8)))
    assert any("line 6 lies inside a scale block of 4x8" in p.line() for p in cut.problems), cut.problems


def test_names_resolve_both_ways_and_against_what_a_side_says():
    found = make_map(tiny(), TrainTopology(1, 2, layout="megatron"), RolloutTopology(1, 2, layout="sglang"))
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    members = [f"model.layers.1.self_attn.{n}_proj.weight" for n in "kqv"]
    assert found.checkpoint_names("engine", fused) == members
    assert found.checkpoint_names("trainer", "decoder.layers.1.self_attention.linear_qkv.weight") == members
    assert found.local_names("engine", members[0]) == [fused]
    with pytest.raises(
        WeightError, match=r"qkv_proj.wieght.*nearest: model.layers.1.self_attn.qkv_proj.weight"
    ):
        found.checkpoint_names("engine", fused.replace("weight", "wieght"))
    with pytest.raises(WeightError, match=r"nearest: model.layers.1.self_attn.k_proj.weight"):
        found.local_names("engine", "model.layers.1.self_attn.k_prj.weight")
    names = {t.name for rank in found.target for t in rank}
    assert found.compare("engine", names) == []
    lines = [
        p.line() for p in found.compare("engine", names - {fused} | {"model.layers.1.self_attn.qkv.weight"})
    ]
    assert any(line.startswith(f"{fused}: the engine does not have it; nearest: model") for line in lines)
    assert any("has it and nothing fills it" in line for line in lines)


def test_a_topology_is_read_from_text():
    base = RolloutTopology(3, dtype="BF16")
    assert parse("tp=2,layout=sglang,block=128x64", base) == RolloutTopology(
        3, 2, layout="sglang", dtype="BF16", block=(128, 64)
    )
    assert parse("dp=2,fsdp=1", TrainTopology()) == TrainTopology(dp=2, fsdp=True)
    for text, message in (("tq=2", "no such size; there are dp, tp"), ("tp=two", "no whole number")):
        with pytest.raises(WeightError, match=message):
            parse(text, TrainTopology())
