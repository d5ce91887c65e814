"""Quantised engines: bounded error, no 0/0, the same bits whatever the buckets, digests of what was received."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tests.engine_models import make_model
from tests.unit.engine.test_weights import generate, update
from turnout.core.errors import ConfigError, ModelError, WeightError
from turnout.engine.core import Activation, EngineCore
from turnout.engine.model import load_model
from turnout.engine.quantise import BLOCK, SCHEMES, quantise
from turnout.engine.quantised import QuantisedStorage
from turnout.engine.settings import EngineSettings
from turnout.engine.weights import Staging
from turnout.weights.buckets import buckets
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of

LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    kinds = ("llama", "qwen3", "qwen3_moe")
    return {
        (kind, seed): make_model(root / f"{kind}{seed}", kind, torch.bfloat16, seed)
        for kind in kinds
        for seed in (0, 1)
    }


def core_on(folder, scheme, dtype="bfloat16") -> EngineCore:
    settings = EngineSettings(folder, dtype=dtype, max_total_tokens=2048, quantization=scheme)
    return EngineCore(load_model(settings), settings, lambda request: None)


def stored(core: EngineCore) -> dict[str, bytes]:
    storage = core.weights.storage
    assert isinstance(storage, QuantisedStorage)
    return {
        name: slot.stored.values.view(torch.int8).numpy().tobytes() + slot.stored.scales.numpy().tobytes()
        for name, slot in storage._live.items()
    }


@pytest.mark.parametrize("shape", [(8, 8), (130, 257), (1, 300), (256, 128)])
def test_the_error_is_bounded_by_half_a_step_of_each_scale(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    exact = quantise(weight, "int8")
    assert exact.scales.shape == (shape[0], 1)
    assert torch.all((exact.dequantised(torch.float32) - weight.float()).abs() <= exact.scales * 0.5001)
    coarse = quantise(weight, "fp8")
    assert coarse.scales.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    most = weight.abs().max().item()
    error = (coarse.dequantised(torch.float32) - weight.float()).abs()
    assert torch.all(error <= weight.float().abs() / 16 + most / 448 / 2**9)
    assert error.max() > 0  # else nothing was quantised


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay_zeros_and_subnormals_stay_finite(scheme):
    weight = torch.zeros(2 * BLOCK, 2 * BLOCK)
    weight[BLOCK:, :BLOCK] = 1e-40
    weight[0, -1] = -3.0
    back = quantise(weight, scheme).dequantised(torch.float32)
    assert torch.isfinite(back).all() and back[0, -1] == -3.0
    assert not back[1:BLOCK].any() and not back[:BLOCK, :BLOCK].any()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_updated_engine_equals_a_fresh_one_and_attests_the_export(folders, scheme, kind, dtype):
    core = core_on(folders[kind, 0], scheme, dtype)
    before, first = generate(core), stored(core)
    done = update(core, folders[kind, 1])
    assert done.attested.root == root_of(read_checkpoint(folders[kind, 1]))
    fresh = core_on(folders[kind, 1], scheme, dtype)
    assert fresh.attested.root == done.attested.root
    assert stored(core) == stored(fresh) != first
    assert generate(core) == generate(fresh) != before
    update(core, folders[kind, 1], "v3")  # the same again: as good as the first
    assert stored(core) == stored(fresh)
    update(core, folders[kind, 0], "v4")
    assert generate(core) == before and stored(core) == first
    core.weights.verify()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_stored_is_a_fresh_quantisation_of_the_export(folders, scheme):
    core = core_on(folders["qwen3", 0], scheme)
    update(core, folders["qwen3", 1])
    held = stored(core)
    assert LAYER in held and "lm_head.weight" not in held
    for tensor in read_checkpoint(folders["qwen3", 1]):
        if tensor.name in held:
            flat = torch.from_numpy(tensor.bits.copy().view(np.int16)).view(torch.bfloat16)
            made = quantise(flat.view(tensor.shape), scheme)
            assert held[tensor.name] == (
                made.values.view(torch.int8).numpy().tobytes() + made.scales.numpy().tobytes()
            )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_wgt_07_wgt_08_buckets_and_order_do_not_matter(folders, scheme):
    target = folders["qwen3", 1]
    results = []
    for limit, order in ((1, 1), (20_000, -1), (1 << 30, 1)):
        core = core_on(folders["qwen3", 0], scheme)
        staging = Staging(core.weights)
        for bucket in buckets(list(read_checkpoint(target))[::order], limit):
            for tensor in bucket:
                staging.add(tensor)
        core.activate(Activation(staging.seal(complete=True), "v2", abort_all=False, flush=True))
        results.append((core.attested.root, stored(core)))
        left_out, *others = read_checkpoint(folders["qwen3", 0])
        staging = Staging(core.weights)
        for tensor in others:
            staging.add(tensor)
        with pytest.raises(WeightError, match=re.escape(left_out.name)):
            staging.seal(complete=True)
        assert stored(core) == results[-1][1]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("part", ["values", "scales"])
def test_a_planted_write_in_the_stored_form_is_caught(folders, scheme, part):
    core = core_on(folders["llama", 0], scheme)
    core.weights.verify()
    slot = core.weights.storage.live(LAYER)
    getattr(slot.stored, part).view(torch.int8)[-1, -1] ^= 1
    with pytest.raises(WeightError, match=LAYER):
        core.weights.verify()


def test_memory_is_a_share_and_release_gives_it_back(folders):
    plain, small = core_on(folders["qwen3", 0], "none"), core_on(folders["qwen3", 0], "int8")
    assert small.reports[0].weight_bytes < 0.8 * plain.reports[0].weight_bytes  # embedding and head stay
    held = small.reports[0].weight_bytes
    before = generate(small)
    assert small.release_memory(["weights"]).freed == {"weights": held}
    small.memory.resume(None)
    update(small, folders["qwen3", 0])
    assert generate(small) == before


def test_what_cannot_be_quantised_is_refused_by_name(folders):
    with pytest.raises(ConfigError, match="quantization"):
        EngineSettings(folders["llama", 0], quantization="int3")
    with pytest.raises(ConfigError, match="2"):
        EngineSettings(folders["llama", 0], quantization="int8", tp_size=2)
    with pytest.raises(ModelError, match="quantization int8"):
        load_model(EngineSettings(folders["llama", 0], quantization="int8", runner="fused"))
