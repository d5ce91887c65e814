from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.train_models import KINDS, batch_of, make_model, make_samples, settings_for
from turnout.core.errors import ModelError
from turnout.train.export import export_tensors, plan_export
from turnout.train.local import LocalBackend
from turnout.transfer.snapshot import Snapshot
from turnout.weights.checkpoint_io import read_checkpoint


def as_tensors(backend: LocalBackend) -> dict[str, torch.Tensor]:
    kinds = {"BF16": (np.int16, torch.bfloat16), "F32": (np.int32, torch.float32)}
    out = {}
    for t in backend.export():
        signed, dtype = kinds[t.dtype]
        out[t.name] = torch.from_numpy(t.bits.view(signed)).view(dtype).reshape(t.shape)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgt_11_the_export_is_the_checkpoint_bit_for_bit(tmp_path, kind, tied, dtype):
    folder = make_model(tmp_path, kind, tied, dtype=dtype)
    backend = LocalBackend(settings_for(folder, dtype=str(dtype).removeprefix("torch.")))
    stored, exported = load_file(folder / "model.safetensors"), as_tensors(backend)
    assert sorted(stored) == sorted(exported)
    for name, tensor in stored.items():
        assert exported[name].dtype == dtype
        assert torch.equal(exported[name], tensor), name
    assert ("lm_head.weight" in exported) == (not tied)


def test_a_tied_head_that_the_checkpoint_stores_is_exported_with_the_embedding(tmp_path):
    folder = make_model(tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    backend = LocalBackend(settings_for(folder))
    backend.train(batch_of(make_samples()))
    exported = as_tensors(backend)
    assert torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])
    assert not torch.equal(exported["lm_head.weight"], stored["lm_head.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_loads_as_a_model_with_the_trainers_log_probs(tmp_path, kind):
    folder, samples = make_model(tmp_path, kind, tied=False), make_samples(seed=50)
    backend = LocalBackend(settings_for(folder))
    backend.train(batch_of(samples))
    save_file(as_tensors(backend), folder / "model.safetensors", metadata={"format": "pt"})
    again = LocalBackend(settings_for(folder))
    assert torch.equal(again._flat.master, backend._flat.master)
    for a, b in zip(again.logprobs(samples), backend.logprobs(samples), strict=True):
        assert np.array_equal(a, b)


def test_an_export_is_not_changed_by_later_steps(tmp_path):
    backend = LocalBackend(settings_for(make_model(tmp_path)))
    kept = [(t.bits, t.bits.copy()) for t in backend.export()]
    backend.train(batch_of(make_samples()))
    assert all(np.array_equal(bits, copy) for bits, copy in kept)


def test_wgt_14_a_checkpoint_that_does_not_fit_the_model_is_refused(tmp_path):
    folder = make_model(tmp_path, tied=False)
    stored = load_file(folder / "model.safetensors")
    del stored["lm_head.weight"], stored["model.norm.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        LocalBackend(settings_for(folder))
    assert [f.where.rsplit(" ", 1)[1] for f in caught.value.faults] == ["lm_head.weight", "model.norm.weight"]


def test_wgt_16_rows_that_pad_the_vocabulary_never_leave_the_trainer(tmp_path):
    """100 rows in the checkpoint, 128 in the model: 100 are exported; what moves in the padding is no change."""
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    stored = {name: torch.randn(100, 8, dtype=torch.bfloat16) for name in names}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    padded = {name: torch.cat([tensor, torch.zeros(28, 8).bfloat16()]) for name, tensor in stored.items()}
    entries = plan_export(tmp_path, padded, None)
    snapshot = Snapshot(read_checkpoint(tmp_path), export_tensors(entries, padded))
    padded[names[0]][100:] += 1
    assert snapshot.survey(export_tensors(entries, padded)).changed == 0
    padded[names[1]][99, 7] += 1
    (delta,) = [d for d in snapshot.changes(export_tensors(entries, padded)) if d.change.count]
    assert (delta.change.shape, list(delta.change.positions)) == ((100, 8), [799])
    for wrong in (
        padded | {names[0]: torch.zeros(99, 8).bfloat16()},
        padded | {names[0]: torch.zeros(128, 9)},
    ):
        with pytest.raises(ModelError, match="embed_tokens"):
            plan_export(tmp_path, wrong, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_trainer_goes_on_bit_for_bit(tmp_path, dtype):
    folder = make_model(tmp_path / "model", dtype=torch.bfloat16)
    settings = settings_for(folder, dtype=dtype, schedule="cosine", warmup_steps=1, total_steps=5)
    batches = [batch_of(make_samples(seed=60 + i), i) for i in range(4)]
    straight = LocalBackend(settings)
    for batch in batches:
        last = straight.train(batch)
    first = LocalBackend(settings)
    for batch in batches[:2]:
        first.train(batch)
    state = tmp_path / "state"
    state.mkdir()
    first.save(state)
    resumed = LocalBackend(settings)
    resumed.train(batches[3])  # another history, which load must replace
    resumed.load(state)
    assert resumed.steps_done == 2
    for batch in batches[2:]:
        report = resumed.train(batch)
    assert torch.equal(resumed._flat.master, straight._flat.master)
    assert torch.equal(resumed._flat.exp_avg_sq, straight._flat.exp_avg_sq)
    assert torch.equal(resumed._flat.compute, straight._flat.compute)
    assert (report.loss, report.lr, report.grad_norm) == (last.loss, last.lr, last.grad_norm)
    with safe_open(state / "master-00000-of-00001.safetensors", framework="pt") as opened:
        assert opened.get_tensor("model.norm.weight").dtype == torch.float32


def test_state_of_another_model_or_broken_files_are_refused_and_change_nothing(tmp_path):
    backend = LocalBackend(settings_for(make_model(tmp_path / "a")))
    other = LocalBackend(settings_for(make_model(tmp_path / "b", tied=False)))
    state = tmp_path / "state"
    state.mkdir()
    other.save(state)
    before = backend._flat.master.clone()
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        backend.load(state)
    backend.save(state)
    (state / "exp_avg-00000-of-00001.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"exp_avg-00000-of-00001\.safetensors: cannot be read"):
        backend.load(state)
    (state / "trainer.json").write_text(json.dumps({"format": 1, "steps": 3}))
    with pytest.raises(ModelError, match=r"trainer\.json: is not of format 2"):
        backend.load(state)
    assert torch.equal(backend._flat.master, before) and backend.steps_done == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_written_later_is_the_state_that_it_was_taken_of(tmp_path, dtype):
    backend = LocalBackend(settings_for(make_model(tmp_path / "model"), dtype=dtype))
    backend.train(batch_of(make_samples(seed=1), 0))
    for name in ("now", "later"):
        (tmp_path / name).mkdir()
    write = backend.copied()
    backend.save(tmp_path / "now")
    backend.train(batch_of(make_samples(seed=2), 1))
    write(tmp_path / "later")
    for name in ("now", "later"):
        backend.load(tmp_path / name)
        found = {kind: tensor.clone() for kind, tensor in backend._flat.resident.items()}, backend.counters
        if name == "now":
            expected = found
    assert found[1] == expected[1] and found[1].steps_done == 1
    assert all(torch.equal(found[0][kind], tensor) for kind, tensor in expected[0].items()) and expected[0]
