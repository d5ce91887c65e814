"""Weight updates: what is refused changes nothing, what is taken is attested from the live tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine_models import KINDS, make_model
from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.engine.core import Activation, EngineCore
from turnout.engine.model import load_model
from turnout.engine.request_machine import Request
from turnout.engine.settings import EngineSettings
from turnout.engine.storage import as_bits
from turnout.engine.weights import Staging, stage_tensors
from turnout.protocol.sglang import SamplingParams
from turnout.weights.checkpoint_io import copy_assets, read_checkpoint, write_checkpoint
from turnout.weights.digest import root_digest, root_of
from turnout.weights.manifest import WeightManifest, done_mark, seal

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two versions of each kind, float32 for Llama's second user below."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    for kind in KINDS:
        for seed in (0, 1):
            made[kind, seed] = make_model(root / f"{kind}{seed}", kind, torch.bfloat16, seed)
    return made


def core_on(folder, dtype="bfloat16", label="default") -> EngineCore:
    settings = EngineSettings(folder, dtype=dtype, max_total_tokens=2048, weight_version=label)
    return EngineCore(load_model(settings), settings, lambda request: None)


def generate(core: EngineCore, new: int = 12) -> tuple[list[int], list[float]]:
    request = Request("r", PROMPT, SamplingParams(max_new_tokens=new, ignore_eos=True), seed=4)
    request.tokens = list(PROMPT)
    core.submit(request)
    while core.step():
        core.check()
    return request.output, request.logprobs


def update(core: EngineCore, folder, label="v2", abort_all=False, flush=True):
    return core.activate(Activation(core.weights.stage_folder(folder), label, abort_all, flush))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_updated_engine_equals_a_fresh_one(folders, kind, dtype):
    core = core_on(folders[kind, 0], dtype)
    before = generate(core)
    done = update(core, folders[kind, 1])
    attested = done.attested
    assert done.met == 0 and done.pause_s >= 0 and attested.version == "v2"
    assert attested.root == root_of(read_checkpoint(folders[kind, 1])) == core.attested.root
    fresh = core_on(folders[kind, 1], dtype)
    assert fresh.attested.root == attested.root
    assert generate(core) == generate(fresh) != before
    update(core, folders[kind, 0], "v3")
    assert generate(core) == before


def test_a_float32_checkpoint_is_rounded_at_the_start_and_refused_in_an_update(folders, tmp_path):
    wide = make_model(tmp_path / "wide", "llama", torch.float32, 3)
    core = core_on(wide)
    assert core.attested.root != root_of(read_checkpoint(wide))  # what is live, not what was read
    assert core.attested.root == core.weights.root == root_digest(core.weights.verify())
    with pytest.raises(WeightError, match="F32, which BF16 cannot hold"):
        core.weights.stage_folder(wide)


def broken(folder, tmp_path, change):
    """A copy of a checkpoint whose tensors went through `change(dict)`."""
    target = tmp_path / "broken"
    target.mkdir()
    copy_assets(folder, target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


NAME = "model.layers.1.mlp.up_proj.weight"


def rename(tensors):
    tensors["model.layers.1.mlp.fc1.weight"] = tensors.pop(NAME)


def drop(tensors):
    del tensors[NAME]


def reshape(tensors):
    tensors[NAME] = tensors[NAME][:-1].contiguous()


def recast(tensors):
    tensors[NAME] = tensors[NAME].float()


def poison(tensors):
    tensors[NAME][3, 3] = float("nan")


def untie(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, "fc1.weight is not a tensor of this model.*up_proj.weight is missing"),
        (drop, "up_proj.weight is missing"),
        (reshape, r"up_proj.weight has shape \[95, 64\], the model's is \[96, 64\]"),
        (recast, "up_proj.weight is F32"),
        (poison, "up_proj.weight has 1 values that are NaN"),
        (untie, "are tied in this model and differ"),
    ],
)
def test_a_refused_checkpoint_changes_nothing(folders, tmp_path, change, message):
    core = core_on(folders["llama", 0])
    before, attested = generate(core), core.attested
    with pytest.raises(WeightError, match=message):
        update(core, broken(folders["llama", 1], tmp_path, change))
    assert core.fenced is None and core.attested == attested
    assert generate(core) == before


def test_tied_weights_may_come_twice_when_they_agree(folders, tmp_path):
    def twice(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    core = core_on(folders["llama", 0])
    folder = broken(folders["llama", 1], tmp_path, twice)
    assert update(core, folder).attested.root == root_of(read_checkpoint(folder))
    assert generate(core) == generate(core_on(folders["llama", 1]))


def published(source, target, **changes):
    """A version folder with manifest and DONE, as the trainer's store writes it."""
    target.mkdir()
    copy_assets(source, target)
    written = write_checkpoint(target, read_checkpoint(source), 40_000)
    version = WeightVersion(0, 3, changes.pop("root", written.root))
    seal(target, WeightManifest(version, "full", 3, "run", "w", written.files, written.tensors, {}))
    return target


def test_a_published_version_is_checked_against_its_manifest(folders, tmp_path):
    core = core_on(folders["llama", 0])
    good = published(folders["llama", 1], tmp_path / "good")
    assert len(list(good.glob("*.safetensors"))) > 1
    lying = published(folders["llama", 1], tmp_path / "lying", root="0" * 32)
    with pytest.raises(WeightError, match="the manifest says 0000"):
        core.weights.stage_folder(lying)
    shard = next(iter(sorted(good.glob("*.safetensors"))))
    data = shard.read_bytes()
    for damage in (None, data[:-8]):
        shard.unlink() if damage is None else shard.write_bytes(damage)
        with pytest.raises(WeightError, match=shard.name):
            core.weights.stage_folder(good)
    shard.write_bytes(data)
    (good / "DONE").unlink()
    with pytest.raises(WeightError, match="DONE"):
        core.weights.stage_folder(good)
    (good / "DONE").write_bytes(done_mark((good / "manifest.json").read_bytes()))
    assert update(core, good).attested.root == root_of(read_checkpoint(folders["llama", 1]))


def test_a_truncated_plain_checkpoint_is_refused(folders, tmp_path):
    folder = broken(folders["llama", 1], tmp_path, lambda tensors: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    core = core_on(folders["llama", 0])
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        core.weights.stage_folder(folder)
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(WeightError):
            core.weights.stage_folder(missing)


def test_a_write_behind_the_books_back_is_found(folders):
    core = core_on(folders["llama", 0])
    core.weights.verify()
    storage = core.weights.storage
    as_bits(storage.live(storage.specs[NAME].buffer)).reshape(-1)[37] ^= 1
    with pytest.raises(WeightError, match=r"changed since.*layers\.1\.mlp\.(gate|up)_proj"):
        core.weights.verify()


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_some_tensors_keeps_the_others(folders, kind):
    core, whole = core_on(folders[kind, 0]), {t.name: t for t in read_checkpoint(folders[kind, 1])}
    names = [name for name in whole if "layers.1" in name or "embed" in name][::2]
    staged = stage_tensors(core.weights, [whole[name] for name in names])
    assert not staged.full
    core.activate(Activation(staged, "v2", False, True))
    mixed = {t.name: t for t in read_checkpoint(folders[kind, 0])} | {name: whole[name] for name in names}
    assert core.attested.root == root_of(mixed.values()) == root_digest(core.weights.verify())
    with pytest.raises(WeightError, match="no tensor"):
        stage_tensors(core.weights, [])


def test_updates_that_were_to_be_whole_and_bring_single_tensors_leave_the_others(folders):
    """Their buffers lie in one piece of memory with those that never come, and take the place of others' parts."""
    core = core_on(folders["llama", 0])
    held = {t.name: t for t in read_checkpoint(folders["llama", 0])}
    other = {t.name: t for t in read_checkpoint(folders["llama", 1])}
    for count in (5, 3, 1):
        staging = Staging(core.weights, whole=True)
        for name in sorted(other)[::count]:
            held[name] = other[name]
            staging.add(other[name])
        staged = staging.seal(complete=False)
        assert staged.full == (count == 1)
        core.activate(Activation(staged, f"v{count}", False, True))
        assert core.attested.root == root_of(held.values()) == root_digest(core.weights.verify())
    assert generate(core) == generate(core_on(folders["llama", 1]))


def test_a_partial_update_staged_beside_other_weights_is_refused(folders):
    core = core_on(folders["llama", 0])
    tensor = core.weights.read(NAME)
    late = stage_tensors(core.weights, [tensor])
    update(core, folders["llama", 1])
    attested = core.attested
    with pytest.raises(WeightError, match="stage again"):
        core.activate(Activation(late, "late", False, True))
    assert core.attested == attested


@pytest.mark.parametrize("flush", [True, False])
def test_requests_in_flight_go_on_and_their_spans_say_so(folders, flush):
    core = core_on(folders["qwen3", 0], label="v1")
    request = Request("a", list(PROMPT), SamplingParams(max_new_tokens=10, ignore_eos=True), 0)
    core.submit(request)
    for _ in range(4):
        core.step()
    assert update(core, folders["qwen3", 1], "v2", flush=flush).met == 1
    while core.step():
        core.check()
    assert request.finish == "length" and request.spans.runs == ((4, "v1"), (6, "v2"))
    resumed = Request("b", request.tokens[:10], SamplingParams(max_new_tokens=6, ignore_eos=True), 0)
    core.submit(resumed)
    while core.step():
        pass
    recomputed = (resumed.output, resumed.logprobs) == (request.output[4:], request.logprobs[4:])
    assert recomputed == flush  # flushed: as if the prefix had been new weights' from the start


def test_an_update_that_aborts_returns_what_exists(folders):
    core = core_on(folders["llama", 0])
    request = Request("a", list(PROMPT), SamplingParams(max_new_tokens=10, ignore_eos=True), 0)
    core.submit(request)
    core.step()
    update(core, folders["llama", 1], abort_all=True)
    assert request.finish == "abort" and request.generated == 1 and core.load.used_pages == 0


def test_a_duplicated_name_in_two_shards_is_refused(folders, tmp_path):
    folder = tmp_path / "twice"
    folder.mkdir()
    copy_assets(folders["llama", 1], folder)
    tensors = load_file(folders["llama", 1] / "model.safetensors")
    save_file(tensors, folder / "a.safetensors")
    save_file({NAME: tensors[NAME]}, folder / "b.safetensors")
    placed = dict.fromkeys(tensors, "a.safetensors") | {"extra": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(WeightError, match="twice"):
        core_on(folders["llama", 0]).weights.stage_folder(folder)


def test_expert_names_reach_every_live_element(folders):
    core = core_on(folders["qwen3_moe", 0])
    specs = core.weights.storage.specs
    live = sum(int(np.prod(spec.shape)) for spec in specs.values())
    assert live == sum(
        p.numel() for p in core.model.module.parameters()
    )  # the module's own: MoE is not packed
    assert set(specs) == {t.name for t in read_checkpoint(folders["qwen3_moe", 0])}
