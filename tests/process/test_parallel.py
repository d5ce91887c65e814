"""Sharded engines, each rank a process of its own, against one process."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine_models import make_model
from tests.engine_process import EngineProcess, parts, serving
from turnout.core.errors import WeightError, WeightsUnknown
from turnout.engine.core import Activation, EngineCore
from turnout.engine.delta import ChangeStaging
from turnout.engine.parallel_storage import LIVE
from turnout.engine.patches import Patch
from turnout.engine.request_machine import Request
from turnout.engine.settings import EngineSettings
from turnout.engine.step import StepInput, TableChange
from turnout.engine.weights import stage_tensors
from turnout.protocol.sglang import SamplingParams
from turnout.weights.changes import Change
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_digest, root_of

TOLERANCE = 1e-5  # float32: sums over ranks are rounded in another order than inside one matrix product
BFLOAT16_RATIO = 1.3  # mean error against float32, as a multiple of one process's own
SHARE = 0.55
FORMS = [("llama", "float32"), ("qwen3", "bfloat16"), ("qwen3_moe", "float32")]
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def core_on(folder: Path, dtype: str, **flags) -> EngineCore:
    chosen = {"max_total_tokens": 2048, "runner": "module"} | flags
    return EngineCore.build(EngineSettings(folder, dtype=dtype, **chosen), lambda request: None)


def requests() -> list[Request]:
    made = []
    for i, (prompt, temperature) in enumerate(((5, 1.0), (40, 0.7), (100, 0.0))):
        ids = torch.randint(3, 300, (prompt,), generator=torch.Generator().manual_seed(i)).tolist()
        params = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=temperature)
        made.append(Request(f"r{i}", ids, params, seed=i))
    return made


def run(core: EngineCore, asked: list[Request]) -> list[tuple[list[int], list[float]]]:
    for request in asked:
        core.submit(request)
    while core.step():
        core.check()
    return [(request.output, request.logprobs) for request in asked]


def scores(core: EngineCore, count: int = 90) -> np.ndarray:
    """Log-probs of the same tokens in every engine. The step is made by hand and writes into free pages."""
    assert core.flush_cache()
    ids = torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(7)).numpy()
    targets = np.stack([np.arange(count - 1), ids[1:]], axis=1)
    step = StepInput(
        ids, np.arange(count, dtype=np.int32), np.zeros(count, np.int32), (TableChange(0, 0, tuple(range(6))),),
        np.empty(0, np.int64), (), targets,
    )  # fmt: skip
    return np.array(core.runner.run(step).scores)


class Case:
    """One model, by one process and by two ranks."""

    def __init__(self, root: Path, kind: str, dtype: str) -> None:
        self.dtype = dtype
        self.folders = [make_model(root / f"m{seed}", kind, getattr(torch, dtype), seed) for seed in (0, 1)]
        self.one = core_on(self.folders[0], dtype)
        self.two = core_on(self.folders[0], dtype, tp_size=2)


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def case(request, tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Case(tmp_path_factory.mktemp("models"), *request.param)
    yield made
    made.two.close()
    assert all(gone(report.pid, 0.5) for report in made.two.reports[1:])
    torch.set_num_threads(before)


def close_to(found, expected) -> None:
    for (tokens, logprobs), (own_tokens, own_logprobs) in zip(found, expected, strict=True):
        assert tokens == own_tokens
        assert np.abs(np.array(logprobs) - own_logprobs).max() < TOLERANCE


def test_two_ranks_give_what_one_process_gives(case):
    if case.dtype == "float32":
        close_to(run(case.two, requests()), run(case.one, requests()))
        assert np.abs(scores(case.two) - scores(case.one)).max() < TOLERANCE
        return
    exact = scores(core_on(case.folders[0], "float32"))
    own, split = (np.abs(scores(core) - exact).mean() for core in (case.one, case.two))
    assert split < BFLOAT16_RATIO * own


def test_a_result_does_not_depend_on_the_batch(case):
    together = run(case.two, requests())
    for request, expected in zip(requests(), together, strict=True):
        assert case.two.flush_cache()
        assert run(case.two, [request]) == [expected]


def test_each_rank_holds_about_half_of_the_weights(case):
    (whole,) = case.one.reports
    ranks = case.two.reports
    assert len({report.pid for report in ranks}) == len(ranks) == 2
    for report in ranks:
        assert whole.weight_bytes / 2 <= report.weight_bytes <= SHARE * whole.weight_bytes
        assert report.kv_bytes == whole.kv_bytes / 2


def test_an_update_gives_the_root_of_one_process_and_the_results_of_a_fresh_engine(case):
    before = run(case.two, requests())
    for core in (case.one, case.two):
        core.activate(Activation(core.weights.stage_folder(case.folders[1]), "v2", False, True))
    assert case.two.attested.root == case.one.attested.root == root_of(read_checkpoint(case.folders[1]))
    after = run(case.two, requests())
    assert after != before
    if case.dtype == "float32":
        close_to(after, run(case.one, requests()))
    whole = {tensor.name: tensor for tensor in read_checkpoint(case.folders[0])}
    for names in (list(whole)[::2], list(whole)[1::2]):  # two partial updates lead back
        staged = stage_tensors(case.two.weights, [whole[name] for name in names])
        case.two.activate(Activation(staged, "v3", False, True))
    assert case.two.attested.root == root_of(whole.values()) == root_digest(case.two.weights.verify())
    assert run(case.two, requests()) == before
    for name, tensor in whole.items():
        assert np.array_equal(case.two.weights.read(name).bits, tensor.bits)
    case.one.activate(Activation(case.one.weights.stage_folder(case.folders[0]), "v3", False, True))


def test_the_digest_is_of_the_memory_of_every_rank(case):
    split, same = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.input_layernorm.weight"
    channel = case.two.weights.storage._weights
    for name, message in ((split, f"changed since.*{split}"), (same, f"{same} differs between the ranks")):
        bits = case.two.weights.read(name).bits
        mine = bits if name == same else bits.reshape(64, 64)[:, 32:].copy()
        channel.tell_one(1, ("write", LIVE, name), np.zeros_like(mine))
        with pytest.raises(WeightError, match=message):
            case.two.weights.verify()
        channel.tell_one(1, ("write", LIVE, name), mine)
        case.two.weights.verify()


def changed(weights, share=0.02):
    """An update of some elements of every tensor, not yet activated, and the new bits by name."""
    random, staging, expected = np.random.default_rng(3), ChangeStaging(weights), {}
    for name, (dtype, shape, _) in weights.lines.items():
        bits = staging.bits(name).copy()
        at = np.sort(random.choice(bits.size, max(1, int(share * bits.size)), replace=False))
        bits[at] ^= 5
        staging.add(Change(name, dtype, shape, at.astype(np.int32), bits[at]))
        expected[name] = bits
    return staging.seal(complete=False), expected


def test_changes_are_written_by_the_rank_that_holds_them(case):
    weights = case.two.weights
    before = run(case.two, requests())
    staged, expected = changed(weights)
    assert staged.patches is not None and not staged.buffers
    assert run(case.two, requests()) == before  # the changes are with the ranks, and nothing is written
    root = case.two.activate(Activation(staged, "v2", False, True)).attested.root
    assert root == root_digest(weights.verify()) and run(case.two, requests()) != before
    for name, bits in expected.items():
        assert np.array_equal(weights.read(name).bits, bits)
    del staged
    assert weights.storage._weights.ask(("staged",)) == [0]
    case.two.activate(Activation(weights.stage_folder(case.folders[0]), "v3", False, True))
    assert run(case.two, requests()) == before


def test_a_rank_that_writes_one_element_off_fences_the_engine(case):
    weights = case.two.weights
    before = run(case.two, requests())
    staged, _ = changed(weights)
    prepared = staged.patches.prepared
    place = weights.storage._places[1]
    name = "model.layers.1.self_attn.q_proj.weight"
    sent = [weights.storage._part(Patch(n, d, d, c, b), place) for n, d, c, b in rows(weights, staged)]
    at = prepared.names.index(name)
    index = sent[at].index.copy()
    index[0] += 1 if index[0] + 1 not in index else -1
    sent[at] = replace(sent[at], index=index)
    weights.storage._weights.tell_one(1, ("patches", prepared.key, sent))
    weights.storage._weights.ask(("staged",))  # has been taken
    with pytest.raises(WeightsUnknown, match=f"other weights were read than staged: {name}"):
        case.two.activate(Activation(staged, "v2", False, True))
    assert "unknown weights" in (case.two.fenced or "")
    case.two.activate(Activation(weights.stage_folder(case.folders[0]), "v3", False, True))
    assert case.two.fenced is None and run(case.two, requests()) == before


def rows(weights, staged):
    """The patches that were sent, made again: `changed` always chooses the same."""
    random = np.random.default_rng(3)
    for name, (dtype, _, _) in weights.lines.items():
        bits = weights.read(name).bits.copy()
        at = np.sort(random.choice(bits.size, max(1, int(0.02 * bits.size)), replace=False)).astype(np.int32)
        yield name, dtype, at, bits[at] ^ 5


def test_a_refused_update_leaves_no_buffer_behind(case):
    tensors = [tensor for tensor in read_checkpoint(case.folders[1]) if "layers.1" not in tensor.name]
    before = run(case.two, requests())
    attested = case.two.attested
    staged = stage_tensors(case.two.weights, tensors)
    assert case.two.weights.storage._weights.ask(("staged",))[0] > 0
    del staged
    assert case.two.weights.storage._weights.ask(("staged",)) == [0]
    assert case.two.attested == attested and run(case.two, requests()) == before


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@linux
def test_the_memory_of_a_rank_grows_by_its_share_only(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    used, held = [], []
    for name, changes in (("small", {}), ("large", sizes)):
        core = core_on(make_model(tmp_path / name, "llama", torch.float32, **changes), "float32", tp_size=2)
        run(core, requests()[:1])
        used.append(anonymous_bytes(core.reports[1].pid))
        held.append(core_on(tmp_path / name, "float32").reports[0].weight_bytes)
        core.close()
    assert held[1] - held[0] > 50e6
    assert used[1] - used[0] < SHARE * (held[1] - held[0]) + 8e6  # and 8 MB for buffers of wider rows


def gone(pid: int, deadline_s: float = 20.0) -> bool:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    return [make_model(root / f"m{seed}", "qwen3_moe", torch.float32, seed) for seed in (0, 1)]


SERVED = {
    "killed": ("--tp", "2", "--ep", "2", "--dtype", "float32"),
    "stands still": ("--tp-size", "2", "--rank-timeout-s", "3"),
    "told": ("--tp", "2"),
}


@pytest.fixture(scope="module")
def servers(folders, tmp_path_factory):
    """An engine of two ranks for each end that a test brings it to, started side by side."""
    flags = [(*own, "--max-total-tokens", "4096") for own in SERVED.values()]
    with serving(*(EngineProcess(folders[0], tmp_path_factory.mktemp("e"), *own) for own in flags)) as made:
        yield dict(zip(SERVED, made))


@linux
def test_experts_over_two_ranks_by_http_and_a_rank_that_is_killed(folders, servers):
    server = servers["killed"]
    info = server.call("/server_info")[1]
    assert (info["tp_size"], info["ep_size"]) == (2, 2)
    first, second = info["ranks"]
    assert first["pid"] == server.process.pid != second["pid"]
    assert first["weight_bytes"] == second["weight_bytes"]
    for folder in folders:
        status, reply = server.call("/update_weights_from_disk", {"model_path": str(folder)})
        assert status == 200 and reply["root"] == root_of(read_checkpoint(folder))
        own = core_on(folder, "float32")
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        expected = run(own, [Request("r", list(range(5, 40)), params, seed=5)])
        close_to([parts(server.generate(list(range(5, 40)), 24))], expected)
        assert second["weight_bytes"] <= SHARE * own.reports[0].weight_bytes
    os.kill(second["pid"], signal.SIGKILL)
    assert server.process.wait(30) == 70
    line = f"engine engine-0 ends: rank 1 (process {second['pid']}) was ended by signal 9"
    assert line in server.log.read_text() and "Traceback" not in server.log.read_text()
    assert gone(second["pid"])


@linux
def test_a_rank_that_stands_still_ends_the_engine_at_the_deadline(servers):
    server = servers["stands still"]
    pid = server.call("/server_info")[1]["ranks"][1]["pid"]
    assert server.generate([5, 6, 7], 4)[0] == 200
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises((OSError, ConnectionError)):
        server.generate([5, 6, 7], 4)
    assert server.process.wait(30) == 70
    assert f"rank 1 (process {pid}) did not take part in a step within 3 s" in server.log.read_text()
    assert gone(pid)


@linux
def test_a_sharded_engine_that_is_told_to_stop_leaves_no_rank(servers):
    server = servers["told"]
    pid = server.call("/server_info")[1]["ranks"][1]["pid"]
    assert server.stop() == 0
    assert gone(pid, 0.5)
