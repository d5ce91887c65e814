"""Ranks that give their memory back between steps, each its own part: the bits of ranks that stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.ranks import Ranks
from tests.train_models import batch_of, make_model, make_samples
from tests.unit.train.test_critic import rewarded, with_critic
from tests.unit.train.test_sharded_critic import sharded, told
from turnout.core.errors import InvariantBroken, UserError
from turnout.placement import footprint
from turnout.placement.footprint import enough
from turnout.train.sharded import ShardedBackend
from turnout.weights.digest import root_of

WORDS = 98


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


def state_of(backend):
    return {piece.name: piece.copied().tensors for piece in backend._pieces()}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name][kind])
        for name, kinds in one.items()
        for kind, tensor in kinds.items()
    )


def bits_job(settings, kept, folder, batches):
    """Whether everything has the same bits, by what it is."""
    stays, goes = ShardedBackend(settings), ShardedBackend(replace(settings, offload=kept))
    found = {"the file has no name": list(kept.iterdir()) == []}
    goes.offload()
    adamw = goes._trained["critic_"]
    found["it is away"] = not any(part.untyped_storage().nbytes() for part in adamw._here["master"].values())
    for call in (lambda: goes.train(batches[0]), lambda: goes.logprobs(batches[0].samples), goes.offload):
        with pytest.raises(InvariantBroken, match="given back"):
            call()
    for step, batch in enumerate(batches):
        goes.onload()
        found[f"report {step}"] = told(goes.train(batch)) == told(stays.train(batch))
        goes.offload()
        found[f"export {step}"] = root_of(goes.export()) == root_of(stays.export())
        saved = folder / f"state-{step}"
        saved.mkdir(exist_ok=True)
        dist.barrier()
        goes.save(saved)
        found[f"state {step}"] = same(state_of(goes), state_of(stays))
        dist.barrier()
    for backend in (goes, stays):
        backend.load(folder / "state-0")
    goes.onload()
    found["loaded"] = same(state_of(goes), state_of(stays))
    found["goes on"] = told(goes.train(batches[1])) == told(stays.train(batches[1]))
    return found


@pytest.mark.parametrize(
    ("kind", "world", "dtype"),
    [("llama", (2, 1, 1), "float32"), ("qwen3_moe", (2, 2, 2), "bfloat16")],
    ids=str,
)
def test_mem_05_what_ranks_train_save_and_export_has_the_bits_of_ranks_that_stay(
    tmp_path, ranks, kind, world, dtype
):
    """Policy, critic and reference; parts of parameters that FSDP pads, and empty ones."""
    folder, kept = make_model(tmp_path / "model", kind, words=WORDS), tmp_path / "kept"
    settings = with_critic(folder, dtype=dtype, reference=folder, kl_coef=0.1)
    batches = [batch_of(rewarded(make_samples(seed=step)), step) for step in range(2)]
    kept.mkdir()
    found = ranks.run(world[0] * world[1], bits_job, sharded(settings, world), kept, tmp_path, batches)
    for rank in found:
        assert all(rank.values()), [name for name, equal in rank.items() if not equal]


def memory_job(settings):
    footprint.SLACK_BYTES = 0
    backend = ShardedBackend(settings)
    backend.train(batch_of(make_samples()))
    held = []
    for _ in range(10):
        given = backend.offload()
        held.append(footprint.pss_bytes(footprint.os.getpid()))
        assert enough(given.asked, given.fell), given
        backend.onload()
    assert max(held[3:]) - held[3] < 4 << 20, held
    return given.asked


def test_mem_01_what_each_rank_gives_back_is_gone_and_cycles_take_no_more(tmp_path, ranks):
    """12 bytes for each of 4 million parameters, in two halves."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    settings = replace(with_critic(tmp_path / "model"), critic=None, offload=tmp_path)
    asked = ranks.run(2, memory_job, sharded(settings, (2, 1, 1)))
    whole = 12 * sum(parameter.numel() for parameter in model.parameters())
    assert asked == [whole // 2] * 2


def full_job(settings):
    def full(*_):
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        footprint.os.posix_fallocate = full
        with pytest.raises(UserError, match=r"--offload-train.*No space left"):
            ShardedBackend(settings)
        return "refused"
    ShardedBackend(settings)
    return "made"


def test_a_disk_that_is_full_for_one_rank_is_told_by_it_and_no_rank_waits(tmp_path, ranks):
    settings = replace(with_critic(make_model(tmp_path, words=WORDS)), offload=tmp_path)
    assert ranks.run(2, full_job, sharded(settings, (2, 1, 1))) == ["made", "refused"]
