"""The fused runner: its packed weights are the checkpoint's bits, its results those of a plain forward in float32
at least as closely as the module of transformers in bf16, on either kernel."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine_models import config, make_model
from turnout.core.errors import ModelError
from turnout.engine import llama
from turnout.engine.core import EngineCore
from turnout.engine.model import load_model, read_config, shape_of
from turnout.engine.packed import DEPTH, TILE, PackedStorage, blocks, depth_blocks
from turnout.engine.request_machine import Request
from turnout.engine.settings import EngineSettings
from turnout.engine.shape import ModelShape
from turnout.native.loader import library, path_taken
from turnout.protocol.sglang import SamplingParams
from turnout.weights.digest import element_sums
from turnout.weights.tensors import HostTensor, nonfinite_count

pytestmark = pytest.mark.skipif(
    library() is None, reason=f"the fused runner needs the C files; {path_taken()}"
)
VARIANTS = {
    "llama": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "odd sizes": ("llama", {"hidden_size": 72, "intermediate_size": 90, "vocab_size": 331}),
    "wide heads": ("llama", {"head_dim": 48, "num_key_value_heads": 1}),
    "scaled rotary": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
}
PROMPTS = [list(range(5, 5 + n)) for n in (3, 20, 41, 70)]


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def folder(request, tmp_path_factory):
    kind, changes = VARIANTS[request.param]
    made = make_model(tmp_path_factory.mktemp("model"), kind, torch.float32, 5, **changes)
    module = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():  # what a fresh model has as zeros and ones must matter too
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    module.to(torch.bfloat16).save_pretrained(made)
    return made


def generate(folder, runner: str) -> list[tuple[list[int], list[float]]]:
    settings = EngineSettings(folder, runner=runner, max_total_tokens=2048)
    core = EngineCore(load_model(settings), settings, lambda request: None)
    asked = [
        Request(f"r{i}", list(p), SamplingParams(max_new_tokens=12, ignore_eos=True), seed=i)
        for i, p in enumerate(PROMPTS)
    ]
    for request in asked:
        core.submit(request)
    while core.step():
        core.check()
    return [(r.output, r.logprobs) for r in asked]


def errors(folder, made: list[tuple[list[int], list[float]]]) -> torch.Tensor:
    """Absolute log-prob differences from a plain forward in float32."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    off = []
    for prompt, (tokens, logprobs) in zip(PROMPTS, made):
        with torch.inference_mode():
            logits = plain(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
        want = torch.log_softmax(logits, -1)[range(len(tokens)), tokens]
        off.append((torch.tensor(logprobs).double() - want).abs())
    return torch.cat(off)


def test_it_is_closer_to_float32_than_the_module_in_bf16(folder):
    assert load_model(EngineSettings(folder, runner="fused")).module is None
    fused, module = errors(folder, generate(folder, "fused")), errors(folder, generate(folder, "module"))
    assert fused.mean() <= 1.1 * module.mean() and fused.median() <= 0.05, (fused.mean(), module.mean())


def test_positions_turn_as_in_the_module(folder):
    settings = EngineSettings(folder, max_total_tokens=2048)
    config = read_config(settings)
    shape = shape_of(config, settings)
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    half = [part[0, :, : shape.head_dim // 2] for part in rotary(torch.zeros(1), torch.arange(512)[None])]
    assert torch.equal(llama._rotary_table(config, shape), torch.cat(half, -1))


PLAIN = """
import json, sys
from pathlib import Path
from turnout.engine import core, llama
light = "transformers.modeling_utils" not in sys.modules
from tests.unit.engine.test_llama import generate
for line in sys.stdin:
    print(json.dumps([light, llama.kernel(), generate(Path(line.strip()), "fused")]), flush=True)
"""


@pytest.fixture(scope="module")
def plain():
    """Asks a process of its own, since the kernel is chosen once: what it makes of the model in a folder."""
    words, environment = [sys.executable, "-c", PLAIN], os.environ | {"TURNOUT_AMX": "0"}
    with subprocess.Popen(words, env=environment, stdin=-1, stdout=-1, text=True) as process:

        def ask(folder):
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def test_the_plain_kernel_agrees_with_the_tiles(folder, plain):
    light, kernel, made = plain(folder)
    assert kernel == "plain vectors"
    assert light, "imports what this runner does without (engine.model)"
    assert errors(folder, made).median() <= 0.05
    if llama.kernel() == kernel:
        assert [tuple(pair) for pair in made] == generate(folder, "fused")


@pytest.mark.parametrize(("rows", "inputs"), [(16, 32), (17, 33), (5, 7), (48, 96), (100, 130), (40, 2101)])
@pytest.mark.parametrize(("first", "step"), [(0, 1), (1, 2)])
def test_packing_is_a_permutation_and_its_digest_that_of_the_rows(rows, inputs, first, step):
    native = library()
    assert native is not None
    rng = np.random.default_rng(rows)
    bits = rng.integers(1, 2**16, rows * inputs, dtype=np.uint16)
    size = (first + blocks(rows) * step) * depth_blocks(inputs) * TILE * DEPTH
    packed, back = np.full(size, 7, np.uint16), np.zeros_like(bits)

    def call(name: str, source, *targets) -> None:
        numbers = [ctypes.c_int64(n) for n in (rows, inputs, first, step)]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in targets]
        getattr(native, name)(ctypes.c_void_p(source.ctypes.data), *numbers, *pointers)

    found = np.zeros(3, np.uint64)
    call("turnout_pack", bits, packed, found)
    call("turnout_unpack", packed, back)
    assert np.array_equal(back, bits)
    blocks_touched = packed.reshape(-1, depth_blocks(inputs) * TILE * DEPTH)[first::step][: blocks(rows)]
    assert np.array_equal(np.sort(blocks_touched[blocks_touched != 0]), np.sort(bits))  # zeros elsewhere
    sums = np.zeros(3, np.uint64)
    call("turnout_digest_packed", packed, sums)
    nonfinite = nonfinite_count(HostTensor("t", "BF16", (bits.size,), bits))
    assert found.tolist() == sums.tolist() == [*element_sums(bits), nonfinite]


def test_tensors_in_one_buffer_do_not_touch_one_another():
    model = config("qwen2", hidden_size=72, intermediate_size=90)
    storage = PackedStorage(model, ModelShape(2, 4, 2, 16, 320, 512, frozenset()))
    rng = np.random.default_rng(0)
    written = {}
    for name, spec in storage.specs.items():
        written[name] = rng.integers(0, 2**16, int(np.prod(spec.shape)), dtype=np.uint16)
        storage.write(storage.live(spec.buffer), name, written[name])
    for name, spec in storage.specs.items():
        assert np.array_equal(storage.read(storage.live(spec.buffer), name), written[name]), name
        assert storage.sums(storage.live(spec.buffer), name, "BF16") == element_sums(written[name])
        assert storage.sums(storage.live(spec.buffer), name, "F32") is None


def test_what_it_cannot_run_is_said(tmp_path, caplog):
    folder = make_model(tmp_path / "m", "llama", torch.bfloat16, head_dim=24)
    with caplog.at_level("INFO"):
        assert load_model(EngineSettings(folder)).module is not None
    assert "head dimension 24 is not a multiple of 16" in caplog.text
    with pytest.raises(ModelError, match="head dimension 24"):
        load_model(EngineSettings(folder, runner="fused"))


@pytest.mark.parametrize(("row", "base"), [
    ({"rope_theta": 1e6}, 1e6),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
    ({"rope_theta": 1e4}, 1e4),
])  # fmt: skip
def test_cfg_19_the_base_of_the_rotation_is_read_in_either_form_of_a_config(row, base, tmp_path):
    """Newer ones have it nested, older ones by itself. No option names it, so there is nothing to contradict."""
    made = make_model(tmp_path / "m", "llama", torch.float32, 5)
    path = made / "config.json"
    kept = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("rope_")}
    path.write_text(json.dumps(kept | row))
    assert AutoModelForCausalLM.from_pretrained(made).config.rope_parameters["rope_theta"] == base
