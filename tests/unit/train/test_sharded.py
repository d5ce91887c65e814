"""Ranks of every shape against LocalBackend, which test_gradients and test_step compare with plain transformers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from tests.train_models import (
    batch_of,
    gradients,
    make_model,
    make_samples,
    reference_model,
    settings_for,
)  # fmt: skip
from turnout.core.errors import ConfigError, ModelError
from turnout.train.head import HeadOptions
from turnout.train.local import LocalBackend
from turnout.train.model import read_config
from turnout.train.settings import AdvantageSettings, OffPolicy
from turnout.train.sharded import ShardedBackend
from turnout.train.sharded_load import Source, empty_causal_model
from turnout.train.sharded_model import check_split

WORLDS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # data parallel x tensor parallel
EXPERTS = [
    (2, 1, 2),
    (4, 1, 2),
    (2, 2, 2),
    (2, 2, 4),
]  # and of all ranks those that have the experts together
TWICE = 3  # steps that are taken twice
WORDS = 98  # divisible by 2, not by 4: FSDP pads


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


def sharded(settings, world):
    data, tensor, *experts = world
    return replace(settings, ranks=data * tensor, tensor_parallel=tensor, expert_parallel=sum(experts) or 1)


def weights(backend) -> dict[str, np.ndarray]:
    return {t.name: t.bits.copy() for t in backend.export()}


def sharded_gradients(settings, samples):
    """Loss, and on rank 0 the whole gradients: they are put where the masters lie and gathered from there."""
    backend, caught = ShardedBackend(settings), {}
    optimizer = backend._adamw

    def keep(_lr, _norm):
        for master in optimizer._masters.values():
            master.data.copy_(master.grad)
        caught.update({name: optimizer.gather(name, torch.float32) for name in optimizer.parameters})

    optimizer.step = keep
    report = backend.train(batch_of(samples))
    return report, {n: g.numpy() for n, g in caught.items() if g is not None}


def gradients_job(cases):
    return [sharded_gradients(*case) for case in cases]


def other_algorithm(folder):
    """GSPO, whose ratio is of whole responses, with a KL in the reward: advantages are of all ranks' log-probs."""
    model = make_model(folder / "gspo", words=WORDS)
    loss = {"eps_clip": 0.02, "opsm_delta": 0.01, "off_policy": OffPolicy(rollout_logprobs=True)}
    base = settings_for(model, name="gspo", kl_kind="k1", max_tokens_per_micro_batch=40, **loss)
    reference = make_model(folder / "reference", words=WORDS, seed=9)
    return replace(base, advantage=AdvantageSettings(kl_coef=0.1), reference=reference)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_gradients_equal_one_process_for_any_packing(tmp_path, ranks, world):
    cases = []
    for kind, tied in (("llama", True), ("qwen3", False), ("qwen3_moe", True)):
        folder = make_model(tmp_path / f"{kind}", kind, tied, words=WORDS)
        for budget in (21, 60, 4096) if kind == "llama" else (60,):
            settings = settings_for(
                folder, max_tokens_per_micro_batch=budget, temperature=0.7, entropy_coef=0.01,
                balance_coef=0.5 if kind == "qwen3_moe" else None,
            )  # fmt: skip
            cases.append((sharded(settings, world), make_samples(seed=4, groups=4, members=4)))
    one = (cases[0][0], make_samples(seed=4)[:1])  # fewer samples than ranks
    cases += [one, (sharded(other_algorithm(tmp_path), world), make_samples(seed=5, groups=4, members=3))]
    found = ranks.run(world[0] * world[1], gradients_job, cases)
    for number, (settings, samples) in enumerate(cases):
        loss, expected = gradients(LocalBackend(settings), samples)
        for rank in found:
            assert rank[number][0].loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert found[0][number][1].keys() == expected.keys()
        for name, grad in expected.items():
            mine = torch.from_numpy(found[0][number][1][name])
            torch.testing.assert_close(
                mine, grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name, c=number: f"case {c}, {n}: {m}"
            )


def recorded_at_random(sample) -> bytes:
    """Two of four experts for each position but the last, in two layers; the same for a shared prompt."""
    rng = np.random.default_rng(len(sample.prompt_ids))
    positions = len(sample.prompt_ids) + len(sample.response_ids) - 1
    rows = [rng.permutation(4)[:2] for _ in range(2 * positions)]
    return np.concatenate(rows).astype(np.int16).tobytes()


@pytest.mark.parametrize("world", EXPERTS, ids=str)
def test_gradients_of_experts_on_several_ranks_equal_one_process(tmp_path, ranks, world):
    """Of the experts, which are added over the ranks that hold the same ones only, and of everything before them;
    with more ranks than samples, with experts that no token comes to, and with the loss that balances them."""
    folder = make_model(tmp_path, "qwen3_moe", words=WORDS)
    settings = settings_for(folder, max_tokens_per_micro_batch=60, entropy_coef=0.01)
    many = make_samples(seed=4, groups=4, members=4)
    again = replace(settings, gradient_checkpointing=True, loss=replace(settings.loss, balance_coef=0.5))
    routed = [replace(s, routed=recorded_at_random(s)) for s in many]
    variants = ((settings, many), (again, many[:1]), (again, routed))
    cases = [(sharded(variant, world), samples) for variant, samples in variants]
    found = ranks.run(world[0] * world[1], gradients_job, cases)
    for number, (variant, samples) in enumerate(variants):
        loss, expected = gradients(LocalBackend(variant), samples)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected.values()))
        for rank in found:
            assert rank[number][0].loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
            assert rank[number][0].grad_norm == pytest.approx(norm, rel=1e-5)
        assert found[0][number][1].keys() == expected.keys()
        for name, grad in expected.items():
            mine = torch.from_numpy(found[0][number][1][name])
            torch.testing.assert_close(
                mine, grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name, c=number: f"case {c}, {n}: {m}"
            )


def loading_job(settings):
    """What was read of the checkpoint at once, [(parameter, elements)]."""
    taken, read = [], Source.read

    def counted(source, parameter, place):
        part = read(source, parameter, place)
        taken.append((parameter, part.numel()))
        return part

    Source.read = counted
    ShardedBackend(settings)
    return taken


@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_reads_what_it_computes_with_and_no_more(tmp_path, ranks, tied):
    settings = settings_for(make_model(tmp_path, "qwen3_moe", tied, words=WORDS))
    whole = {name: p.numel() for name, p in reference_model(tmp_path).named_parameters()}
    for taken in ranks.run(4, loading_job, sharded(settings, (2, 2, 4))):
        assert [name for name, _ in taken].count("model.embed_tokens.weight") == 1
        assert sorted(name for name, _ in taken) == sorted(whole), "each once"
        for name, elements in taken:
            parts = (
                4 if "experts" in name else 2 if "proj" in name or "embed" in name or "head" in name else 1
            )
            assert elements * parts == whole[name], name


def test_a_checkpoint_with_fewer_words_than_its_config_is_refused(tmp_path):
    options = HeadOptions()
    config = json.loads((make_model(tmp_path, words=WORDS) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": WORDS + 2}))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight: has fewer rows than the vocabulary"):
        Source(tmp_path, empty_causal_model(tmp_path, options, False), torch.float32)


def metrics_job(settings, samples):
    return ShardedBackend(settings).train(batch_of(samples)).metrics()


def test_met_01_a_steps_numbers_are_those_of_one_process_on_any_split(tmp_path, ranks):
    """Twelve samples of unequal length, one of them without a gradient, over 1, 2 and 4 ranks."""
    samples = make_samples(seed=9, groups=4, members=3)
    samples = (replace(samples[0], advantages=(0.0,) * len(samples[0].advantages)), *samples[1:])
    settings = settings_for(
        make_model(tmp_path, words=WORDS), kl_coef=0.1, off_policy=OffPolicy("tis"), reference=tmp_path
    )
    expected = LocalBackend(settings).train(batch_of(samples)).metrics()
    apart = {name for name in expected if name.startswith("seconds_")} | {"rows", "micro_batches"}
    for size in (1, 2, 4):
        for found in ranks.run(size, metrics_job, sharded(settings, (size, 1)), samples):
            assert found.keys() == expected.keys()
            for name in expected.keys() - apart:
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (size, name)


def train_job(settings, batches):
    """Reports, the weights at the end (none but on rank 0) and log-probs; of a second backend, after fewer steps,
    reports and weights, and the weights that the first had then."""
    runs, early, answers = [], {}, []
    for count in (len(batches), TWICE):
        backend, reports = ShardedBackend(settings), []
        for batch in batches[:count]:
            reports.append(replace(backend.train(batch), **NO_SECONDS))
            if len(reports) == TWICE < count:
                early = weights(backend)
        runs.append((reports, weights(backend)))
        answers = answers or backend.logprobs(batches[0].samples)
    return *runs[0], answers, early, runs[1]


NO_SECONDS = dict.fromkeys(
    ("seconds_forward", "seconds_backward", "seconds_optimizer", "seconds_total"), 0.0
)  # the only thing that ranks may tell differently


def assert_same_weights(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, bits in expected.items():
        np.testing.assert_allclose(
            found[name].view(np.float32), bits.view(np.float32), err_msg=name, **tolerance
        )


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def long_run(tmp_path_factory, request):
    """20 optimizer steps, two a train step, with everything that crosses ranks, and one process's answer."""
    folder, kind = tmp_path_factory.mktemp("long"), request.param
    settings = settings_for(
        make_model(folder / "policy", kind, words=WORDS),
        reference=make_model(folder / "reference", kind, seed=3, words=WORDS),
        kl_coef=0.1,
        lr=2e-3,
        weight_decay=0.05,
        clip_grad=0.5,
        schedule="cosine",
        total_steps=20,
        samples_per_optimizer_step=6,
        max_tokens_per_micro_batch=40,
        deterministic=True,
    )
    batches = [batch_of(make_samples(seed=70 + i, groups=3, members=4), i) for i in range(10)]
    try:
        backend = LocalBackend(settings)
        reports = [replace(backend.train(batch), **NO_SECONDS) for batch in batches]
    finally:
        torch.use_deterministic_algorithms(False)
    worlds = [(2, 1, 2), (2, 2, 2)] if kind == "qwen3_moe" else [(2, 1), (2, 2)]
    return settings, batches, reports, weights(backend), backend.logprobs(batches[0].samples), worlds


@pytest.mark.parametrize("tensor", [1, 2])
def test_twenty_steps_equal_one_process_and_twice_are_equal_bits(ranks, long_run, tensor):
    settings, batches, expected, final, logprobs, worlds = long_run
    world = worlds[tensor - 1]
    found = ranks.run(world[0] * world[1], train_job, sharded(settings, world), batches)
    reports, mine, answers, early, again = found[0]
    assert reports[:TWICE] == again[0]
    assert len(early) > 0 and all(np.array_equal(early[name], again[1][name]) for name in early)
    for other in found[1:]:  # the same on all ranks, to the last bit, but that one of them has the weights
        assert other[0] == reports and not any(len(bits) for bits in other[1].values())
        assert all(np.array_equal(a, b) for a, b in zip(other[2], answers, strict=True))
    for one, other in zip(reports, expected, strict=True):
        a, b = one.metrics(), other.metrics()
        for name in a.keys() - {"rows", "micro_batches"}:
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-4), (one.step, name)
    assert_same_weights(mine, final, rtol=2e-2, atol=2e-4)
    for a, b in zip(answers, logprobs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def poisoned_job(settings, good, bad):
    backend = ShardedBackend(settings)
    backend.train(good)
    before = {name: m.clone() for name, m in backend._adamw._masters.items()}
    report = backend.train(bad)
    kept = all(torch.equal(before[name], m) for name, m in backend._adamw._masters.items())
    return report.skipped_nonfinite, kept, backend.train(good).optimizer_steps, backend._adamw.steps


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path, ranks):
    settings = sharded(settings_for(make_model(tmp_path, words=WORDS)), (2, 2))
    good = make_samples(seed=35)
    bad = (replace(good[0], advantages=(math.inf,) * len(good[0].response_ids)), *good[1:])
    found = ranks.run(4, poisoned_job, settings, batch_of(good), batch_of(bad))
    assert found == [(1, True, 1, 2)] * 4


def errors_job(settings, batch):
    backend = ShardedBackend(settings)
    with pytest.raises(ConfigError) as caught:
        backend.train(batch)
    return str(caught.value), backend.train(batch_of([])).skipped_empty


def test_a_sequence_above_the_budget_is_refused_on_all_ranks_alike(tmp_path, ranks):
    settings = settings_for(make_model(tmp_path, words=WORDS), max_tokens_per_micro_batch=12)
    batch = batch_of(make_samples(seed=1, longest=30))
    with pytest.raises(ConfigError) as caught:
        LocalBackend(settings).train(batch)
    found = ranks.run(2, errors_job, sharded(settings, (2, 1)), batch)
    assert found == [(str(caught.value), 1)] * 2


def precise_job(settings, batches):
    backend = ShardedBackend(settings)
    reports = [backend.train(batch) for batch in batches]
    masters = {master.dtype for master in backend._adamw._masters.values()}
    return [r.loss for r in reports], masters, weights(backend), reports[-1].grad_norm


def test_bf16_is_near_one_process_in_bf16_and_masters_stay_fp32(tmp_path, ranks):
    folder = make_model(tmp_path, dtype=torch.bfloat16, words=WORDS)
    settings = settings_for(folder, dtype="bfloat16", gradient_checkpointing=True, lr=1e-3)
    batches = [batch_of(make_samples(seed=7 + i), i) for i in range(2)]
    backend = LocalBackend(settings)
    expected = [backend.train(batch) for batch in batches]
    losses, masters, mine, norm = ranks.run(4, precise_job, sharded(settings, (2, 2)), batches)[0]
    assert masters == {torch.float32}
    assert losses == pytest.approx([r.loss for r in expected], rel=0.05, abs=0.02)
    assert norm == pytest.approx(expected[-1].grad_norm, rel=0.1)
    for name, bits in weights(backend).items():
        a, b = (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).float() for x in (mine[name], bits))
        assert mine[name].dtype == np.uint16
        assert torch.linalg.vector_norm(a - b) < 0.02 * torch.linalg.vector_norm(b), name


def resharding_job(settings, load, save, batch):
    backend = ShardedBackend(settings)
    backend.train(batch)  # another history, which load must replace
    backend.load(load)
    report = backend.train(batch)
    backend.save(save)
    return report.step, report.lr, backend.steps_done, weights(backend)


def test_a_state_goes_on_at_any_number_of_ranks(tmp_path, ranks):
    settings = settings_for(
        make_model(tmp_path / "model", "qwen3_moe", tied=False, words=WORDS),
        lr=1e-3, schedule="cosine", warmup_steps=1, total_steps=9,
    )  # fmt: skip
    batches = [batch_of(make_samples(seed=60 + i, groups=2), i) for i in range(6)]
    straight, local = LocalBackend(settings), LocalBackend(settings)
    straight.train(batches[0])
    local.train(batches[0])
    folders = [tmp_path / f"state-{i}" for i in range(6)]
    for folder in folders:
        folder.mkdir()
    local.save(folders[0])
    for number, world in enumerate([(2, 1), (4, 1, 2), (2, 2, 4), (2, 1, 2), (1, 1)], 1):
        expected = straight.train(batches[number])
        found = ranks.run(
            world[0] * world[1],
            resharding_job, sharded(settings, world), folders[number - 1], folders[number], batches[number],
        )  # fmt: skip
        assert found[0][:3] == (number, expected.lr, number + 1)
        assert_same_weights(found[0][3], weights(straight), rtol=1e-3, atol=1e-5)
    assert len(list(folders[3].iterdir())) == 4 * 3 + 1
    again = LocalBackend(settings)
    again.load(folders[5])
    for kind, buffer in straight._flat.state.items():
        torch.testing.assert_close(again._flat.state[kind], buffer, rtol=1e-3, atol=1e-5, msg=kind)
    assert again.counters == straight.counters
    assert_same_weights(weights(again), found[0][3], rtol=0, atol=0)


def refused_job(settings, folder, hide):
    backend = ShardedBackend(settings)
    if hide and dist.get_rank() == 1:
        folder = folder / "not-there"
    before = {name: m.clone() for name, m in backend._adamw._masters.items()}
    with pytest.raises(ModelError) as caught:
        backend.load(folder)
    assert all(torch.equal(before[name], m) for name, m in backend._adamw._masters.items())
    return str(caught.value)


def test_a_state_that_one_rank_cannot_read_changes_no_rank(tmp_path, ranks):
    settings = settings_for(make_model(tmp_path / "model", words=WORDS))
    LocalBackend(settings).save(tmp_path)
    found = ranks.run(2, refused_job, sharded(settings, (2, 1)), tmp_path, True)
    assert "1 of the trainer's ranks cannot read it" in found[0]
    assert "not-there/trainer.json: cannot be read" in found[1]


def test_what_a_model_cannot_be_split_by_is_refused_with_what_divides(tmp_path):
    settings = settings_for(make_model(tmp_path, words=99))
    with pytest.raises(ConfigError) as caught:
        check_split(read_config(tmp_path), sharded(settings, (1, 4)))
    assert [(f.where, f.value) for f in caught.value.faults] == [("--tensor-model-parallel-size", "4")] * 2
    assert "key-value heads, 2, cannot be split by it" in str(caught.value)
    assert "vocabulary, 99, cannot be split by it -> one of 1" in str(caught.value)
    check_split(read_config(tmp_path), sharded(settings, (4, 1)))
    with pytest.raises(ConfigError, match="--expert-model-parallel-size = 2: the model has no experts"):
        check_split(read_config(tmp_path), sharded(settings, (2, 1, 2)))
    moe = read_config(make_model(tmp_path / "moe", "qwen3_moe"))
    with pytest.raises(
        ConfigError, match="4 experts on 6 trainer devices cannot be split by it -> one of 1, 2"
    ):
        check_split(moe, sharded(settings, (6, 1, 3)))
    check_split(moe, sharded(settings, (6, 1, 2)))
