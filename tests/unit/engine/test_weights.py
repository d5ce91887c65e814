"""Weight updates: what is refused changes nothing, what is taken is attested from the live tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine_models import KINDS, make_model
from turnout.core.errors import EngineBusy, WeightError
from turnout.core.version import WeightVersion
from turnout.engine.core import Activation, EngineCore
from turnout.engine.model import load_model
from turnout.engine.scheduler_machine import Request
from turnout.engine.settings import EngineSettings
from turnout.protocol.sglang import SamplingParams
from turnout.weights.checkpoint_io import copy_assets, read_checkpoint, write_checkpoint
from turnout.weights.digest import root_of
from turnout.weights.manifest import WeightManifest

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
    return core.activate(Activation(core.weights.prepare(folder), label, abort_all, flush))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_updated_engine_equals_a_fresh_one(folders, kind, dtype):
    core = core_on(folders[kind, 0], dtype)
    before = generate(core)
    attested, met = update(core, folders[kind, 1])
    assert met == 0 and attested.version == "v2"
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
    assert core.attested.root == core.weights.root({t.name: "BF16" for t in read_checkpoint(wide)})
    with pytest.raises(WeightError, match="F32, which BF16 cannot hold"):
        core.weights.prepare(wide)


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
    assert update(core, folder)[0].root == root_of(read_checkpoint(folder))
    assert generate(core) == generate(core_on(folders["llama", 1]))


def published(source, target, **changes):
    """A version folder with manifest and DONE, as the trainer's store writes it."""
    target.mkdir()
    copy_assets(source, target)
    written = write_checkpoint(target, read_checkpoint(source), 40_000)
    version = WeightVersion(0, 3, changes.pop("root", written.root))
    manifest = WeightManifest(version, "full", 3, "run", "w", written.files, written.tensors)
    (target / "manifest.json").write_bytes(manifest.to_bytes())
    (target / "DONE").touch()
    return target


def test_a_published_version_is_checked_against_its_manifest(folders, tmp_path):
    core = core_on(folders["llama", 0])
    good = published(folders["llama", 1], tmp_path / "good")
    assert len(list(good.glob("*.safetensors"))) > 1
    lying = published(folders["llama", 1], tmp_path / "lying", root="0" * 32)
    with pytest.raises(WeightError, match="the manifest says 0000"):
        core.weights.prepare(lying)
    shard = next(iter(sorted(good.glob("*.safetensors"))))
    data = shard.read_bytes()
    for damage in (None, data[:-8]):
        shard.unlink() if damage is None else shard.write_bytes(damage)
        with pytest.raises(WeightError, match=shard.name):
            core.weights.prepare(good)
    shard.write_bytes(data)
    (good / "DONE").unlink()
    with pytest.raises(WeightError, match="DONE"):
        core.weights.prepare(good)
    (good / "DONE").touch()
    assert update(core, good)[0].root == root_of(read_checkpoint(folders["llama", 1]))


def test_a_truncated_plain_checkpoint_is_refused(folders, tmp_path):
    folder = broken(folders["llama", 1], tmp_path, lambda tensors: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    core = core_on(folders["llama", 0])
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        core.weights.prepare(folder)
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(WeightError):
            core.weights.prepare(missing)


def test_a_failed_write_fences_the_engine_until_a_good_update(folders, monkeypatch):
    core = core_on(folders["llama", 0])
    running = Request("a", list(PROMPT), SamplingParams(max_new_tokens=50, ignore_eos=True), 0)
    core.submit(running)
    core.step()
    real = core.weights.root
    monkeypatch.setattr(core.weights, "root", lambda stored: "f" * 32)
    with pytest.raises(WeightError, match="live tensors give root ffff"):
        update(core, folders["llama", 1])
    assert running.finish == "abort" and running.generated == len(running.logprobs) == 1
    assert core.attested.version == "default" and core.load.used_pages == 0
    with pytest.raises(EngineBusy) as refused:
        generate(core)
    assert refused.value.phase == "fenced"
    monkeypatch.setattr(core.weights, "root", real)
    update(core, folders["llama", 1])
    assert generate(core) == generate(core_on(folders["llama", 1]))


@pytest.mark.parametrize("flush", [True, False])
def test_requests_in_flight_go_on_and_their_spans_say_so(folders, flush):
    core = core_on(folders["qwen3", 0], label="v1")
    request = Request("a", list(PROMPT), SamplingParams(max_new_tokens=10, ignore_eos=True), 0)
    core.submit(request)
    for _ in range(4):
        core.step()
    assert update(core, folders["qwen3", 1], "v2", flush=flush)[1] == 1
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
        core_on(folders["llama", 0]).weights.prepare(folder)


def test_expert_names_reach_every_live_element(folders):
    core = core_on(folders["qwen3_moe", 0])
    live = sum(int(np.prod(view.shape)) for view in core.weights.views.values())
    assert live == sum(p.numel() for p in core.model.module.parameters())
    assert set(core.weights.views) == {t.name for t in read_checkpoint(folders["qwen3_moe", 0])}
