"""What needs a CUDA device: the trainer there against plain transformers on the CPU, its memory, and whole runs.

`tests/gpu/run.sh` runs this on one device, within about ten minutes. Without a device every
test is skipped. TURNOUT_SGLANG_PYTHON names the Python of an environment that has SGLang.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.run_process import TINY, ended, of_kind, processes_of, start, train
from tests.train_models import (
    batch_of,
    gradients,
    make_model,
    make_samples,
    reference_logprobs,
    reference_loss,
    reference_model,
    settings_for,
)
from turnout.train.local import LocalBackend
from turnout.weights.digest import root_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SGLANG = os.environ.get("TURNOUT_SGLANG_PYTHON")
DEADLINE_S = 400.0


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_loss_and_gradients_equal_those_of_transformers_on_a_cpu(tmp_path: Path, kind: str):
    folder, samples = make_model(tmp_path, kind), make_samples(seed=3)
    backend = LocalBackend(settings_for(folder, max_tokens_per_micro_batch=40))
    assert backend._flat.master.is_cuda
    loss, found = gradients(backend, samples)
    model = reference_model(folder)
    wanted = reference_loss([reference_logprobs(model, s) for s in samples], samples, backend.settings.loss)
    wanted.backward()
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-4, abs=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name].cpu(), parameter.grad, rtol=2e-3, atol=2e-5, msg=name)


def test_two_trainers_with_one_seed_have_the_same_bits(tmp_path: Path):
    settings = settings_for(make_model(tmp_path, dtype=torch.bfloat16), dtype="bfloat16", deterministic=True)
    one, two = LocalBackend(settings), LocalBackend(settings)
    for step in range(3):
        batch = batch_of(make_samples(seed=step), step)
        assert one.train(batch).loss == two.train(batch).loss
    assert root_of(one.export()) == root_of(two.export())


def test_a_trainer_that_leaves_gives_its_device_memory_back_and_keeps_its_bits(tmp_path: Path):
    folder = make_model(tmp_path / "model", dtype=torch.bfloat16, words=200_000)  # 13 M parameters
    settings = settings_for(folder, dtype="bfloat16")
    stays, goes = (LocalBackend(s) for s in (settings, replace(settings, offload=tmp_path / "kept")))
    for step in range(5):
        batch = batch_of(make_samples(seed=step), step)
        assert goes.train(batch).loss == stays.train(batch).loss
        given = goes.offload()
        assert given.fell >= 0.9 * given.asked, given
        assert root_of(goes.export()) == root_of(stays.export())
        goes.onload()


def run_of(folder: Path, *switches: str, **words: Any) -> Path:
    run = folder / "run"
    flags = [*switches]
    flags += [str(word) for name, value in words.items() for word in (f"--{name.replace('_', '-')}", value)]
    status, out, err = ended(start("train", str(TINY), "--run-dir", str(run), *flags), DEADLINE_S)
    assert status == 0, out[-3000:] + err[-3000:]
    return run


def check(run: Path, level: str) -> None:
    """Every version was proved on the engine, nothing was lost, nothing is left."""
    attested = of_kind(run, "VersionAttested")
    assert attested and {row["level"] for row in attested} == {level}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["groups"]["lost"] == 0 == summary["audit"]["failed"]
    assert processes_of(run) == []


def test_a_run_with_its_trainer_on_the_device_and_the_embedded_engine_on_the_cpu(tmp_path: Path):
    status, out, err = train(tmp_path / "run", "--num-rollout", "4")
    assert status == 0, out[-3000:] + err[-3000:]
    check(tmp_path / "run", "memory")


@pytest.mark.skipif(SGLANG is None, reason="TURNOUT_SGLANG_PYTHON names no environment with SGLang")
@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_a_run_on_sglang_on_the_same_device(tmp_path: Path, transport: str):
    """Both stay on the device; by `tensor` the handles of torch's IPC go to SGLang, whose checksums prove them."""
    assert SGLANG is not None
    subprocess.run([SGLANG, "-c", "import sglang"], check=True, timeout=300)
    run = run_of(
        tmp_path, engine="sglang", sglang_python=SGLANG, num_rollout=3, eval_num_prompts=4,
        update_weight_transport=transport, engine_start_timeout_s=300,
    )  # fmt: skip
    check(run, "checksum")


@pytest.mark.parametrize("encoding", ["indices", "packed"])
def test_deltas_from_a_snapshot_of_a_trainer_on_the_device(tmp_path: Path, encoding: str):
    run = run_of(
        tmp_path, "--check-weight-update-equal",
        num_rollout=4, update_weight_mode="delta", update_weight_encoding=encoding,
    )  # fmt: skip
    check(run, "memory")
