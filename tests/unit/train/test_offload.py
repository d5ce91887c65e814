"""A trainer that gives its memory back between steps: the bits of one that stays, and the memory really gone."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.train_models import batch_of, make_model, make_samples, settings_for
from turnout.core.errors import InvariantBroken, UserError
from turnout.placement import footprint
from turnout.placement.footprint import enough, pss_bytes
from turnout.train.local import LocalBackend
from turnout.weights.digest import root_of


def state_of(backend: LocalBackend) -> dict[str, torch.Tensor]:
    flat = backend._flat
    return {**flat.state, "compute": flat.compute}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_mem_05_what_is_trained_saved_and_exported_has_the_bits_of_a_trainer_that_stays(
    tmp_path, kind, dtype
):
    folder = make_model(tmp_path / "model", kind, dtype=torch.bfloat16)
    settings = settings_for(folder, dtype=dtype, reference=folder, kl_coef=0.1)
    stays, goes = (LocalBackend(s) for s in (settings, replace(settings, offload=tmp_path / "kept")))
    assert list((tmp_path / "kept").iterdir()) == [], "the file has no name"
    goes.offload()
    for step in range(3):
        goes.onload()
        batch = batch_of(make_samples(seed=step), step)
        assert goes.train(batch).loss == stays.train(batch).loss
        goes.offload()
        assert root_of(goes.export()) == root_of(stays.export())
        saved = tmp_path / f"state-{step}"
        saved.mkdir()
        goes.save(saved)
    goes.onload()
    for name, tensor in state_of(stays).items():
        assert torch.equal(tensor, state_of(goes)[name]), name
    assert goes._flat.grad.count_nonzero() == 0, "what lies between parameters counts in the norm"
    goes.offload()
    goes.load(tmp_path / "state-1")
    goes.onload()
    again = LocalBackend(settings)
    again.load(tmp_path / "state-1")
    for name, tensor in state_of(again).items():
        assert torch.equal(tensor, state_of(goes)[name]), name


def test_steps_need_the_memory_and_it_moves_in_order(tmp_path):
    settings = settings_for(make_model(tmp_path / "model"))
    backend = LocalBackend(replace(settings, offload=tmp_path))
    with pytest.raises(InvariantBroken, match="there already"):
        backend.onload()
    backend.offload()
    samples = make_samples()
    for call in (
        lambda: backend.train(batch_of(samples)),
        lambda: backend.logprobs(samples),
        backend.offload,
    ):
        with pytest.raises(InvariantBroken, match="given back"):
            call()
    with pytest.raises(InvariantBroken, match="stay in memory"):
        LocalBackend(settings).offload()


def test_a_step_that_is_under_way_keeps_its_gradients(tmp_path):
    backend = LocalBackend(replace(settings_for(make_model(tmp_path / "model")), offload=tmp_path))
    next(iter(backend._flat.slots.values())).ready()
    with pytest.raises(InvariantBroken, match="between two steps"):
        backend.offload()


def test_a_full_disk_is_told_before_the_first_step(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"--offload-train.*No space left"):
        LocalBackend(replace(settings_for(make_model(tmp_path / "model")), offload=tmp_path / "kept"))


def test_mem_01_what_is_given_back_is_gone_and_fifty_cycles_take_no_more(tmp_path, monkeypatch):
    """Some 60 MB; the bound of 0.9 without the slack that small models have on a run."""
    monkeypatch.setattr(footprint, "SLACK_BYTES", 0)
    monkeypatch.setattr(gc, "collect", int)  # of a process full of tests it takes longer than all the rest
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    backend = LocalBackend(replace(settings_for(tmp_path / "model", dtype="bfloat16"), offload=tmp_path))
    backend.train(batch_of(make_samples()))
    held: list[int] = []
    for cycle in range(50):
        given = backend.offload()
        assert given.asked > 50 << 20 and enough(given.asked, given.fell), (cycle, given)
        for _ in backend.export():
            pass
        held.append(pss_bytes(os.getpid()))
        backend.onload()
    assert max(held[5:]) - held[5] < 4 << 20, held
