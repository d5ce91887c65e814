"""Deltas into real engine processes: from a store and through a group, over one process and over ranks; what is
refused changes nothing, who was killed comes back by one call, and nothing grows."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.delta_versions import Versions
from tests.engine_models import make_model
from tests.engine_process import EngineProcess, engine, parts, serving
from tests.process.test_engine_updates import Sender, segments
from tests.unit.engine.test_weights import core_on
from turnout.engine.request_machine import Request
from turnout.protocol.sglang import SamplingParams
from turnout.weights import delta_bucket
from turnout.weights.buckets import TORCH_NAMES
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of

PROMPT = [10, 20, 30, 40]
FLAGS = ("--max-total-tokens", "4096", "--max-running-requests", "4", "--max-step-tokens", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m", "llama", torch.bfloat16, 0)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    allowed = ("--allowed-root", str(tmp_path_factory.getbasetemp() / "stores"), "--allowed-root", str(model))
    with engine(model, tmp_path_factory.mktemp("engine"), *FLAGS, *allowed) as process:
        yield process
        assert "Traceback" not in process.log.read_text()


@pytest.fixture
def served(server, model, tmp_path_factory, request):
    """The engine on the model, and a store that begins with it."""
    yield server, Versions(tmp_path_factory.getbasetemp() / "stores" / request.node.name, model)
    server.call("/end_weight_update", {})
    body = {"model_path": str(model), "weight_version": "default"}
    assert server.call("/update_weights_from_disk", body)[0] == 200


def update(server, published, **more):
    body = {"model_path": str(published.folder), "load_format": "delta", "flush_cache": False} | more
    status, row = server.call("/update_weights_from_disk", body)
    assert status == 200 and row["success"], row
    return row


def holds(server, root, label=None):
    """The server recomputes all digests from its live tensors."""
    status, row = server.call("/weights_checker", {"action": "checksum"})
    assert status == 200 and row["per_engine_checksum"] == root, row
    status, row = server.call("/weight_version")
    assert status == 200 and row["root"] == root and label in (None, row["version"])


def answers_as_fresh(server, versions, folder):
    """Tokens and log-probs, bit for bit, of an engine that loaded the same weights as a plain checkpoint."""
    fresh = core_on(versions.as_checkpoint(folder))
    request = Request("r", list(PROMPT), SamplingParams(max_new_tokens=30, ignore_eos=True), seed=5)
    fresh.submit(request)
    while fresh.step():
        pass
    assert fresh.attested.root == server.call("/weight_version")[1]["root"]
    server.call("/flush_cache", {})
    assert parts(server.generate(PROMPT, 30)) == (request.output, request.logprobs)


def test_versions_of_a_store_by_every_call(served, tmp_path):
    server, versions = served
    assert server.call("/server_info")[1]["delta_formats"] == ["turnout-weights/2", "delta_bucket"]
    first, _, last = (versions.delta(0.02) for _ in range(3))
    label = last.version.label
    body = {"model_path": str(last.folder), "load_format": "delta"}
    status, ready = server.call("/prepare_weights", body)  # three deltas at once
    assert status == 200 and ready["root"] == last.version.root
    with ThreadPoolExecutor(1) as pool:
        flying = pool.submit(server.generate, PROMPT, 500)
        server.wait_for(lambda load: load["num_used_tokens"] >= 16)
        call = {"prepared_id": ready["prepared_id"], "flush_cache": False}
        status, row = server.call("/activate_weights", call)
        assert (row["version"], row["root"], row["verified"]) == (label, last.version.root, "incremental")
        made_by = [v["version"] for v in flying.result(60)[1]["meta_info"]["weight_versions"]]
        assert made_by == ["default", label]  # no token from the two between
    holds(server, versions.version.root, label)
    row = update(server, last)
    assert row["pause_s"] == 0 and row["version"] == label  # held already
    prepared = versions.delta(0.02, "packed")
    body = {"model_path": str(prepared.folder), "load_format": "auto"}  # says itself that it is a delta
    status, row = server.call("/prepare_weights", body)
    assert status == 200 and row["root"] == prepared.version.root
    holds(server, last.version.root, label)
    status, row = server.call("/activate_weights", {"prepared_id": row["prepared_id"]})
    assert status == 200 and row["version"] == prepared.version.label
    holds(server, prepared.version.root, prepared.version.label)
    versions.store._files.remove_tree(first.folder)
    answers_as_fresh(server, versions, tmp_path / "fresh")


def test_what_cannot_be_reached_or_was_altered_is_refused_by_name(served, model):
    server, versions = served
    before, root = parts(server.generate(PROMPT, 12)), versions.version.root
    lost, far = versions.delta(0.02), versions.delta(0.02)
    versions.store._files.remove_tree(lost.folder)
    status, row = server.call(
        "/update_weights_from_disk", {"model_path": str(far.folder), "load_format": "delta"}
    )
    assert status == 400 and f"no way leads from {root} to {far.version.root}" in row["message"]
    outside = {"model_path": str(model), "load_format": "delta"}  # its parent is no allowed folder
    status, row = server.call("/update_weights_from_disk", outside)
    assert status == 400 and "outside the folders" in row["message"]
    versions.version = type(versions.version)(0, 0, root)
    versions.tensors = {t.name: t for t in read_checkpoint(versions.checkpoint)}
    good = versions.delta(0.02)
    file = good.folder / "delta-00000.safetensors"
    content = file.read_bytes()
    for bad, message in (
        (content[:-9], "delta-00000.safetensors has"),
        (content[:-9] + bytes(b ^ 1 for b in content[-9:]), "not those that were written"),
    ):
        file.write_bytes(bad)
        status, row = server.call(
            "/update_weights_from_disk", {"model_path": str(good.folder), "load_format": "delta"}
        )
        assert status == 400 and message in row["message"]
    holds(server, root, "default")
    assert parts(server.generate(PROMPT, 12)) == before
    file.write_bytes(content)
    update(server, good)
    holds(server, good.version.root)


def send(sender, server, changes, limit, **last):
    """The changes as buckets through a group; returns the answers' statuses."""
    found = []
    for bucket in delta_bucket.cut(changes, limit):
        data = np.empty(delta_bucket.nbytes(bucket), np.uint8)
        placed = delta_bucket.pack(bucket, data)
        body = {
            "names": [part.name for part in placed],
            "dtypes": [TORCH_NAMES[part.dtype] for part in placed],
            "shapes": [list(part.shape) for part in placed],
            "counts": [part.count for part in placed],
            "group_name": sender.name,
            "load_format": "delta_bucket",
        } | last
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.call, "/update_weights_from_distributed", body)
            sender.broadcast(torch.from_numpy(data))
            found.append(answer.result(30))
    return found


@pytest.mark.parametrize("limit", [1, 1000, 1 << 20])
def test_changes_through_a_group_in_buckets_of_any_size(served, limit):
    server, versions = served
    sender, base = Sender(server), versions.version.root
    versions.move(0.0005 if limit == 1 else 0.05)
    root = root_of(versions.tensors.values())
    status, row = server.call("/begin_weight_update", {"base_root": "0" * 32})
    assert status == 400 and f"with root {base}" in row["message"]
    assert server.call("/begin_weight_update", {"base_root": base})[0] == 200
    label = f"v000009-{root[:16]}"
    answers = send(sender, server, versions.changes, limit, weight_version=label)
    assert {status for status, _ in answers} == {200} and (limit > 1 or len(answers) > 10)
    holds_begun = server.call("/weight_version")[1]
    assert holds_begun["root"] == base
    status, row = server.call("/end_weight_update", {"root": root})
    assert status == 200 and (row["version"], row["root"]) == (label, root), row
    holds(server, root, label)
    # the same again: what is held is no longer the base
    assert server.call("/begin_weight_update", {"base_root": base})[0] == 400
    # a version that changes nothing has a label of its own
    assert server.call("/begin_weight_update", {"base_root": root})[0] == 200
    empty = {"names": [], "dtypes": [], "shapes": [], "counts": [], "group_name": sender.name}
    again = f"v000010-{root[:16]}"
    body = empty | {"load_format": "delta_bucket", "weight_version": again}
    assert server.call("/update_weights_from_distributed", body)[0] == 200
    assert server.call("/end_weight_update", {})[1]["version"] == again
    holds(server, root, again)


def test_a_sender_whose_root_differs_or_whose_change_is_faulty_changes_nothing(served):
    server, versions = served
    sender, base = Sender(server), versions.version.root
    versions.move(0.05)
    assert server.call("/begin_weight_update", {"base_root": base})[0] == 200
    assert send(sender, server, versions.changes[1:], 1 << 20)[0][0] == 200
    status, row = server.call("/end_weight_update", {"root": root_of(versions.tensors.values())})
    assert status == 400 and "the sender's is" in row["message"]
    holds(server, base, "default")
    assert server.call("/begin_weight_update", {"base_root": base})[0] == 200
    bad = versions.changes[3]
    bad.bits[0] = 0x7F80
    status, row = send(sender, server, [bad], 1 << 20)[0]
    assert status == 400 and f"{bad.name} would get 1 values that are NaN or infinite" in row["message"]
    status, row = server.call("/end_weight_update", {})
    assert status == 400 and bad.name in row["message"]
    holds(server, base, "default")
    empty = {"names": [], "dtypes": [], "shapes": [], "counts": [], "group_name": sender.name}
    status, row = server.call("/update_weights_from_distributed", empty | {"load_format": "delta_bucket"})
    assert status == 400 and "only after /begin_weight_update with a base_root" in row["message"]


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3_moe", "bfloat16"), ("qwen2", "float32")])
def test_deltas_over_two_ranks(kind, dtype, tmp_path):
    model = make_model(tmp_path / "model", kind, torch.bfloat16, 0)
    (tmp_path / "work").mkdir()
    split = ("--tp", "2", "--dtype", dtype, *(("--ep", "2") if kind.endswith("moe") else ()))
    versions = Versions(tmp_path / "store", model)
    with engine(model, tmp_path / "work", *FLAGS, *split) as server:
        for share, encoding in ((0.02, "indices"), (0.4, "deltas"), (0.02, "ranked"), (0.02, "xor")):
            published = versions.delta(share, encoding)
            assert update(server, published)["root"] == published.version.root
            holds(server, published.version.root)
        sender = Sender(server)
        base = versions.version.root
        versions.move(0.02)
        root = root_of(versions.tensors.values())
        assert server.call("/begin_weight_update", {"base_root": base})[0] == 200
        send(sender, server, versions.changes, 5000)
        assert server.call("/end_weight_update", {"root": root})[0] == 200
        holds(server, root)
        found = parts(server.generate(PROMPT, 30))
        body = {"model_path": str(versions.as_checkpoint(tmp_path / "full"))}
        assert server.call("/update_weights_from_disk", body)[1]["root"] == root
        assert parts(server.generate(PROMPT, 30)) == found


def test_an_engine_killed_at_any_instant_of_an_update_comes_back_by_one_call(model, tmp_path):
    versions = Versions(tmp_path / "store", model)
    chosen = random.Random(3)
    folders = [tmp_path / name for name in ("first", "second", "after")]
    for folder in folders:
        folder.mkdir()
    with serving(*(EngineProcess(model, folder, *FLAGS) for folder in folders)) as [*mortal, server]:
        for victim in mortal:
            published = versions.delta(0.1, "packed")
            killer = threading.Timer(chosen.uniform(0, 0.06), victim.process.kill)
            killer.start()
            with contextlib.suppress(OSError):
                update(victim, published)
            victim.process.wait(30)
        update(server, published)  # both deltas
        holds(server, published.version.root, published.version.label)
        answers_as_fresh(server, versions, tmp_path / "fresh")


def held(pid: int) -> dict[str, int]:
    """Bytes of anonymous memory, and open files, of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    anonymous = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return {"bytes": anonymous, "files": len(os.listdir(f"/proc/{pid}/fd"))}  # noqa: PTH208


def test_mem_02_nothing_grows_over_50_updates(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 2048}
    model = make_model(tmp_path / "model", "llama", torch.bfloat16, 0, **sizes)  # 4 MB
    (tmp_path / "work").mkdir()
    versions = Versions(tmp_path / "store", model)
    with engine(model, tmp_path / "work", *FLAGS) as server:
        found, before = [], segments()
        for at in range(60):
            if at % 10 == 9:
                versions.move(0.3)
                published = versions.full()
            else:
                published = versions.delta(0.3 if at % 10 == 4 else 0.01)
            update(server, published)
            shutil.rmtree(published.folder)
            if at >= 10:  # after every kind came once
                found.append(held(server.process.pid))
        holds(server, versions.version.root)
        time.sleep(0.1)
        assert found[-1]["files"] <= found[0]["files"] + 2 and segments() == before
        first, last = (min(row["bytes"] for row in part) for part in (found[:10], found[-10:]))
        assert last < first + 2e6, (first, last)
