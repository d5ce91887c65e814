"""Changes of live weights: an engine after them equals a fresh one bit for bit; what does not fit changes nothing;
what was written wrongly is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.delta_versions import Versions
from tests.engine_models import make_model
from tests.unit.engine.test_weights import core_on, generate
from turnout.core.errors import EngineBusy, WeightError, WeightsUnknown
from turnout.engine import packed, patches
from turnout.engine.core import Activation
from turnout.engine.delta import ChangeStaging, merged, stage_version
from turnout.engine.patches import Patch, in_lines, placed
from turnout.weights.changes import Change
from turnout.weights.codecs.registry import CODECS
from turnout.weights.digest import add, element_sums, root_of

CASES = [
    ("llama", {}, "bfloat16"),  # tied, packed
    ("llama", {"tie_word_embeddings": False}, "bfloat16"),
    ("qwen2", {}, "bfloat16"),  # biases, packed
    ("qwen3", {}, "bfloat16"),
    ("qwen3_moe", {}, "bfloat16"),  # a module, with stacked experts
    ("llama", {}, "float32"),  # bf16 weights that live in float32
    ("llama", {"dtype": torch.float16}, "float32"),  # so do float16's, and float32's as they are
    ("qwen3_moe", {"dtype": torch.float32}, "float32"),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], case[2], *map(str, case[1].values())]))
def world(request, tmp_path):
    kind, changes, dtype = request.param
    folder = make_model(tmp_path / "model", kind, **({"dtype": torch.bfloat16, "seed": 0} | changes))
    return core_on(folder, dtype), Versions(tmp_path / "store", folder)


@pytest.fixture
def small(tmp_path):
    folder = make_model(tmp_path / "model", "llama", torch.bfloat16, 0)
    return core_on(folder), Versions(tmp_path / "store", folder)


def load(core, published, flush=True):
    staged = stage_version(core.weights, published.folder)
    return core.activate(Activation(staged, published.version.label, False, flush))


def equals_fresh(core, versions, folder):
    """Weights, digests from live memory, tokens and log-probs."""
    fresh = core_on(versions.as_checkpoint(folder), core.settings.dtype)
    assert fresh.weights.root == core.weights.root == root_of(versions.tensors.values())
    assert core.weights.verify() == core.weights.lines == fresh.weights.lines
    for name in versions.tensors:
        assert np.array_equal(core.weights.read(name).bits, fresh.weights.read(name).bits), name
    assert generate(core) == generate(fresh)


@pytest.mark.parametrize("share", [0.01, 0.15, 0.6])
def test_an_engine_after_deltas_equals_a_fresh_one(world, tmp_path, share):
    core, versions = world
    before = generate(core)
    for _ in range(2):
        published = versions.delta(share)
        done = load(core, published)
        assert done.attested.root == versions.version.root and done.attested.verified == "incremental"
    assert share < 0.1 or generate(core) != before
    equals_fresh(core, versions, tmp_path / "fresh")


@pytest.mark.parametrize("encoding", sorted(CODECS))
def test_every_encoding_and_a_chain_of_them(world, tmp_path, encoding):
    core, versions = world
    for _ in range(3):
        published = versions.delta(0.03, encoding)
    done = load(core, published)  # three deltas, one activation
    assert done.attested.version == published.version.label
    equals_fresh(core, versions, tmp_path / "fresh")


def test_who_holds_something_else_comes_by_an_anchor_and_the_deltas_after_it(world, tmp_path):
    core, versions = world
    load(core, versions.delta(0.05))
    versions.move(0.3)
    versions.full()
    versions.delta(0.02)
    published = versions.delta(0.02)
    other = core_on(make_model(tmp_path / "other", core_kind(core), torch.bfloat16, 5, **core_changes(core)))
    if core.settings.dtype == "bfloat16":
        assert load(other, published).attested.verified == "full"
        equals_fresh(other, versions, tmp_path / "fresh other")
    load(core, published)
    equals_fresh(core, versions, tmp_path / "fresh")


def core_kind(core):
    return core.model.config.model_type


def core_changes(core):
    return {"tie_word_embeddings": core.model.config.tie_word_embeddings}


def test_wgt_04_a_version_that_is_held_is_success_without_work(small):
    core, versions = small
    published = versions.delta(0.05)
    load(core, published)
    staged = stage_version(core.weights, published.folder)
    assert staged.nothing and staged.root == published.version.root
    generation = core.weights.generation
    done = core.keep("v-other")
    assert (done.attested.version, done.pause_s) == ("v-other", 0.0) == (core.attested.version, 0.0)
    assert core.weights.generation == generation


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(small, tmp_path):
    core, versions = small
    before, root = generate(core), core.weights.root
    lost = versions.delta(0.05)
    published = versions.delta(0.05)
    versions.store._files.remove_tree(lost.folder)
    with pytest.raises(WeightError, match=f"no way leads from {root} to {published.version.root}"):
        load(core, published)
    assert core.weights.root == root and generate(core) == before and core.weights.verify()


NAME = "model.layers.1.self_attn.k_proj.weight"  # in one buffer with two others


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "model.layers.1.fc1.weight"}, "fc1.weight is not a tensor of this model"),
        ({"dtype": "F16"}, f"{NAME} is F16, what is held is BF16"),
        ({"shape": (64, 32)}, r"has shape \[64, 32\], the model's is \[32, 64\]"),
        ({"bits": np.array([0x7F80, 1], np.uint16)}, f"{NAME} would get 1 values that are NaN or infinite"),
    ],
)
def test_a_faulty_change_is_told_by_name(small, change, message):
    core, _ = small
    good = Change(NAME, "BF16", (32, 64), np.array([3, 70], np.int32), np.array([1, 2], np.uint16))
    staging = ChangeStaging(core.weights)
    staging.add(replace(good, **change))
    with pytest.raises(WeightError, match=message):
        staging.seal(complete=False)
    twice = ChangeStaging(core.weights)
    twice.add(good)
    twice.add(good)
    with pytest.raises(WeightError, match=f"{NAME}: changes came twice"):
        twice.seal(complete=False)


def test_pieces_of_a_change_are_one_change(small):
    core, versions = small
    deltas = versions.move(0.2)
    staging = ChangeStaging(core.weights)
    for at in (0, 1):
        for change in [delta.change for delta in deltas]:
            half = change.count // 2
            some = slice(half) if at == 0 else slice(half, None)
            staging.add(replace(change, positions=change.positions[some], bits=change.bits[some]))
    staged = staging.seal(complete=False)
    core.activate(Activation(staged, "v", False, True))
    assert core.weights.root == root_of(versions.tensors.values()) == core.attested.root
    assert core.weights.verify()


def test_one_of_two_tied_names_moves_both_and_two_must_agree(tmp_path):
    folder = make_model(tmp_path / "model", "llama", torch.bfloat16, 0)
    core = core_on(folder)
    twins = core.weights.storage.tied[0]
    shape = core.weights.storage.specs[twins[0]].shape
    change = Change(twins[0], "BF16", shape, np.array([3, 700], np.int32), np.array([1, 2], np.uint16))
    known = [name for name in twins if name in core.weights.lines]
    staging = ChangeStaging(core.weights)
    staging.add(replace(change, name=known[0]))
    core.activate(Activation(staging.seal(complete=False), "v", False, True))
    assert core.weights.verify()[known[0]] == core.weights.lines[known[0]]
    assert core.weights.read(twins[0]).bits[700] == core.weights.read(twins[1]).bits[700] == 2


def test_a_checkpoint_with_both_tied_names(tmp_path):
    folder = make_model(tmp_path / "model", "llama", torch.bfloat16, 0)
    held = load_file(folder / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, folder / "model.safetensors")
    core, versions = core_on(folder), Versions(tmp_path / "store", folder)
    deltas = {delta.change.name: delta for delta in versions.move(0.05)}
    one = deltas["model.embed_tokens.weight"]
    deltas["lm_head.weight"] = replace(one, change=replace(one.change, name="lm_head.weight"))
    other = versions.tensors["lm_head.weight"]
    versions.tensors["lm_head.weight"] = replace(
        other, bits=versions.tensors["model.embed_tokens.weight"].bits
    )
    load(core, versions.publish(list(deltas.values())))
    assert core.weights.root == root_of(versions.tensors.values()) and core.weights.verify()
    with pytest.raises(WeightError, match="are tied in this model and differ"):
        load(core, versions.delta(0.05))


def test_a_delta_that_leads_elsewhere_than_it_says_is_refused_before_anything_is_written(small):
    core, versions = small
    deltas = versions.move(0.05)
    at = next(i for i, delta in enumerate(deltas) if delta.change.name == NAME)
    bits = deltas[at].change.bits.copy()
    bits[1] ^= 1
    deltas[at] = replace(deltas[at], change=replace(deltas[at].change, bits=bits))
    root = core.weights.root
    with pytest.raises(WeightError, match=f"the manifest says.*other: {NAME}"):
        load(core, versions.publish(deltas))
    assert core.weights.root == root and core.weights.verify()


def test_a_tensor_in_neither_state_and_one_too_few_are_refused_by_name(small):
    core, versions = small
    base, held = versions.version, dict(versions.tensors)
    deltas = versions.move(0.05)
    at = next(i for i, delta in enumerate(deltas) if delta.change.name == NAME)
    other = versions.publish([*deltas[:at], replace(deltas[at], before="0" * 32), *deltas[at + 1 :]])
    with pytest.raises(WeightError, match=f"neither the state before nor after for {NAME}"):
        load(core, other)
    versions.version, versions.tensors = base, held
    deltas = versions.move(0.05)
    with pytest.raises(WeightError, match=f"and those held differ in {NAME}"):
        load(core, versions.publish(deltas[:at] + deltas[at + 1 :]))
    assert core.weights.root == base.root and core.weights.verify()


@pytest.mark.parametrize("axis", [0, 1])
def test_what_of_a_change_lies_in_some_lines(axis):
    random = np.random.default_rng(axis)
    whole = random.integers(0, 1 << 16, (12, 8), np.uint16)
    positions = np.sort(random.choice(96, 40, replace=False)).astype(np.int32)
    bits = random.integers(0, 1 << 16, 40, np.uint16)
    expected = whole.copy()
    expected.reshape(-1)[positions] = bits
    part, patch = (slice(None),) * axis + (slice(2, 6),), Patch("w", "BF16", "BF16", positions, bits)
    moves = []
    for first, count in ((0, 2), (2, 4), (6, whole.shape[axis] - 6)):
        mine, index = in_lines(patch, whole.shape, axis, first, count)
        memory = whole[(slice(None),) * axis + (slice(first, first + count),)].copy()
        moves.append(patches.exchange(memory.reshape(-1), placed(mine, index, memory.size), write=True))
        if first == 2:
            assert np.array_equal(memory, expected[part])
    total = add(add(moves[0], moves[1]), moves[2])  # of all parts together: the whole's
    assert add(element_sums(whole), total) == element_sums(expected)


def shifted(places, by=1):
    def wrong(*arguments):
        index = places(*arguments)
        index[-1] += by
        return index

    return wrong


def test_a_write_one_element_off_in_a_fused_buffer_is_found(small, monkeypatch):
    core, versions = small
    root, published = core.weights.root, versions.delta(0.02, only=".k_proj.")
    monkeypatch.setattr(packed, "packed_places", shifted(packed.packed_places, 2))
    with pytest.raises(WeightError, match="the manifest says"):
        load(core, published)
    assert core.weights.root == root and core.weights.verify()


def test_a_write_of_one_element_into_another_expert_is_found(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "model", "qwen3_moe", torch.bfloat16, 0)
    core, versions = core_on(folder), Versions(tmp_path / "store", folder)
    published = versions.delta(0.02, only=".experts.")
    storage = core.weights.storage
    index = storage._index
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    staged = stage_version(core.weights, published.folder)
    monkeypatch.setitem(index, name, (4, *index[name][1:]))  # from here on it lies in expert 4
    with pytest.raises(WeightsUnknown, match=f"other weights were read than staged: {name}"):
        core.activate(Activation(staged, published.version.label, False, True))


def test_unknown_weights_fence_the_engine_until_a_full_update(small, tmp_path, monkeypatch):
    core, versions = small
    published = versions.delta(0.02)
    staged = stage_version(core.weights, published.folder)

    def one_missing(target, change, write):
        if write and change.patch.name == NAME:
            change = replace(change, index=change.index[:-1], patch=less(change.patch))
        return patches.exchange(target, change, write)

    def less(patch):
        return replace(patch, positions=patch.positions[:-1], bits=patch.bits[:-1])

    monkeypatch.setattr(packed, "exchange", one_missing)
    with pytest.raises(WeightsUnknown, match=NAME):
        core.activate(Activation(staged, published.version.label, False, True))
    monkeypatch.undo()
    assert core.attested.version == "unknown" and "unknown weights" in (core.fenced or "")
    with pytest.raises(EngineBusy, match="unknown weights"):
        generate(core)
    with pytest.raises(WeightError):
        load(core, published)  # no full version leads there: the base is not known to be held
    with pytest.raises(WeightError):
        core.keep("v")
    versions.full()
    after = versions.delta(0.02)
    load(core, after)
    assert core.fenced is None
    equals_fresh(core, versions, tmp_path / "fresh")


def test_another_update_between_staging_and_activation_is_refused(small):
    core, versions = small
    staged = stage_version(core.weights, versions.delta(0.02).folder)
    core.activate(Activation(staged, "v", False, True))
    with pytest.raises(WeightError, match="another update came between"):
        core.activate(Activation(staged, "v", False, True))
    assert core.weights.verify() and core.fenced is None


def test_which_way_is_taken_depends_on_the_share_of_each_buffer(small, caplog):
    core, versions = small
    swapped = []
    storage = core.weights.storage
    swap = storage.swap
    storage.swap = lambda buffers: (swapped.append(set(buffers)), swap(buffers))
    load(core, versions.delta(0.1))
    assert not swapped
    load(core, versions.delta(0.5, only=".k_proj."))  # a quarter of its buffer's elements are keys
    assert not swapped
    load(core, versions.delta(0.9, only=".k_proj."))
    assert swapped == [{"layer0.qkv", "layer1.qkv"}]
    assert core.weights.verify()


@pytest.mark.parametrize("seed", range(20))
def test_merged_changes_do_what_they_do_one_after_the_other(seed):
    random = np.random.default_rng(seed)
    base = random.integers(0, 9, 40, np.uint16)
    both = []
    for _ in range(2):
        at = np.sort(random.choice(40, random.integers(0, 20), replace=False)).astype(np.int32)
        both.append(Change("w", "BF16", (40,), at, random.integers(0, 9, at.size, np.uint16)))
    expected = base.copy()
    for change in both:
        expected[change.positions] = change.bits
    made = merged(*both)
    base[made.positions] = made.bits
    assert np.array_equal(base, expected) and np.all(np.diff(made.positions) > 0)


def test_an_audit_finds_what_changed_unseen_and_lets_updates_pass(small):
    import threading

    core, versions = small
    stop = threading.Event()
    assert core.weights.audit(stop) == core.weights.generation
    verify_one = core.weights._measure
    published = [versions.delta(0.02)]

    def during(name, dtype):
        found = verify_one(name, dtype)
        if published:
            load(core, published.pop())
        return found

    core.weights._measure = during
    assert core.weights.audit(stop) == -1  # all right, but of no single version
    del core.weights._measure
    memory = core.weights.storage.live("layer1.qkv")
    memory[7] += 1
    with pytest.raises(
        WeightError, match=r"changed since they were attested: .*layers\.1\.self_attn\.q_proj"
    ):
        core.weights.audit(stop)


def test_the_numpy_path_gives_the_same(world, tmp_path, monkeypatch):
    core, versions = world
    monkeypatch.setattr(patches, "library", lambda: None)
    monkeypatch.setattr(patches, "packed_places", reference_places)
    monkeypatch.setattr(packed, "packed_places", reference_places)
    load(core, versions.delta(0.05))
    monkeypatch.undo()
    assert core.weights.verify() == core.weights.lines
    equals_fresh(core, versions, tmp_path / "fresh")


def reference_places(positions, columns, first, step):
    rows, column = np.divmod(positions, columns)
    depth = -(-columns // packed.DEPTH)
    block = first + rows // packed.TILE * step
    size = packed.TILE * packed.DEPTH
    return (
        block * depth * size + column // 2 * (packed.TILE * 2) + rows % packed.TILE * 2 + column % 2
    ).astype(positions.dtype)
