"""A train batch as a file, and the trainer of a run that has none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.train_models import KINDS, batch_of, make_model, make_samples, settings_for
from turnout.core.errors import DataError, TrainError
from turnout.schedule.weight_plane import base_root
from turnout.train.local import LocalBackend
from turnout.train.saved_batch import batch_bytes, read_batch
from turnout.train.untrained import UntrainedBackend


def test_what_is_read_is_what_was_written(tmp_path):
    samples = list(make_samples(seed=3))
    samples[1] = replace(samples[1], lags=())
    samples[2] = replace(samples[2], reference=tuple(x - 0.1 for x in samples[2].logprobs))
    samples[3] = replace(
        samples[3], group_id="é\u2028", advantages=(float("inf"),) * len(samples[3].advantages)
    )
    path = tmp_path / "b"
    for batch in (batch_of(samples, 7), batch_of([], 0)):
        path.write_bytes(batch_bytes(batch, {"groups": [{"reward": None}]}))
        saved = read_batch(path)
        assert saved.batch == batch and saved.about == {"groups": [{"reward": None}]}


def test_a_torn_file_and_one_of_another_kind_are_refused_by_name(tmp_path):
    data = batch_bytes(batch_of(make_samples()), {})
    torch_file = make_model(tmp_path / "model") / "model.safetensors"
    for content in (data[:-8], data[:20], b"", b"not a batch", torch_file.read_bytes()):
        (tmp_path / "torn").write_bytes(content)
        with pytest.raises(DataError, match="torn: cannot be read"):
            read_batch(tmp_path / "torn")
    with pytest.raises(DataError, match="absent"):
        read_batch(tmp_path / "absent")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_trainer_the_base_version_is_the_same(tmp_path, kind, stored, dtype):
    folder = make_model(tmp_path, kind, tied=False, dtype=stored)
    trainer = LocalBackend(settings_for(folder, dtype=dtype))
    assert base_root(UntrainedBackend(folder, dtype), folder) == base_root(trainer, folder)


def test_a_run_without_a_trainer_scores_nothing_and_needs_no_torch(tmp_path):
    with pytest.raises(TrainError, match="--debug-rollout-only"):
        UntrainedBackend(tmp_path, "float32").logprobs(make_samples())
    code = "import sys, turnout.train.untrained, turnout.train.saved_batch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
