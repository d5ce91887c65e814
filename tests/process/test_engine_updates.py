"""Every way of weights into one engine process, over real HTTP, shared memory and a Gloo group; reading, checking
and giving memory back; what is refused leaves the old weights answering."""

from __future__ import annotations

import base64
import io
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file, save_file

from tests.engine_models import make_model
from tests.engine_process import engine, parts
from turnout.weights.checkpoint_io import copy_assets, read_checkpoint
from turnout.weights.digest import root_of

PROMPT = [10, 20, 30, 40]
NAME = "model.layers.1.mlp.up_proj.weight"
UPDATE_TIMEOUT_S = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / f"m{seed}", "llama", torch.bfloat16, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def tensors(models):
    return [load_file(model / "model.safetensors") for model in models]


@pytest.fixture(scope="module")
def roots(models):
    return [root_of(read_checkpoint(model)) for model in models]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    flags = ("--max-total-tokens", "8192", "--max-running-requests", "4", "--max-step-tokens", "64")
    flags += ("--update-timeout-s", str(UPDATE_TIMEOUT_S))
    allowed = ("--allowed-root", str(tmp_path_factory.getbasetemp()))
    with engine(models[0], tmp_path_factory.mktemp("engine"), *flags, *allowed) as process:
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


@pytest.fixture
def calm(server, models, roots):
    """The server, idle and on its first weights before and after each test; afterwards it must be fine."""
    before = parts(server.generate(PROMPT, 12))
    yield server
    server.call("/end_weight_update", {})
    server.wait_for(lambda load: load["num_total_reqs"] == 0)
    assert server.load()["num_used_tokens"] == 0
    update(server, models[0], "default")
    assert server.call("/health_generate")[0] == 200
    assert parts(server.generate(PROMPT, 12)) == before


def segments():
    """Shared memory of this process that still has a name."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}  # noqa: PTH208


def update(server, model, label):
    status, row = server.call(
        "/update_weights_from_disk", {"model_path": str(model), "weight_version": label}
    )
    assert status == 200 and row["success"], row
    return row


def send(server, named, load_format=None, **more):
    """One /update_weights_from_tensor of tensors by name, pickled as SGLang's MultiprocessingSerializer does."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    copies = {
        name: tensor.clone() for name, tensor in named.items()
    }  # pickling moves a tensor into a segment
    value = list(copies.items()) if load_format is None else flattened(copies)
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    entry = base64.b64encode(buffer.getvalue()).decode()
    body = {"serialized_named_tensors": [entry], "load_format": load_format} | more
    return server.call("/update_weights_from_tensor", body)


def flattened(named):
    parts_, metadata, at = [], [], 0
    for name, tensor in named.items():
        piece = tensor.contiguous().view(-1).view(torch.uint8)
        end = at + piece.numel()
        metadata.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=at, end_idx=end, numel=end - at
            )
        )
        parts_.append(piece)
        at = end
    return {"flattened_tensor": torch.cat(parts_), "metadata": metadata}


def halves(named):
    names = list(named)
    cut = len(names) // 2
    return [{n: named[n] for n in part} for part in (names[:cut], names[cut:])]


def served(server):
    row = server.call("/weight_version")[1]
    return row["version"], row["root"], row["verified"]


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_wgt_07_wgt_08_what_comes_between_begin_and_end_is_activated_as_a_whole(
    calm, models, tensors, roots, load_format
):
    first, held = served(calm), segments()
    assert calm.call("/begin_weight_update", {"selector": "all"}) == (
        200,
        {"success": True, "message": "tensors are staged until /end_weight_update"},
    )
    label = f"v000004-{roots[1][:16]}"
    one, two = halves(tensors[1])
    assert send(calm, one, load_format, flush_cache=False)[0] == 200
    assert served(calm) == first
    assert send(calm, two, load_format, weight_version=label)[0] == 200
    assert served(calm) == first
    status, row = calm.call("/end_weight_update", {})
    assert status == 200 and (row["version"], row["root"], row["verified"]) == (label, roots[1], "full")
    assert row["pause_s"] >= 0 and segments() == held  # read, so freed
    assert served(calm) == (label, roots[1], "full")
    updated = parts(calm.generate(PROMPT, 20))
    update(calm, models[1], "disk")
    assert parts(calm.generate(PROMPT, 20)) == updated


def test_tensors_without_begin_are_an_update_of_their_own(calm, tensors, models, tmp_path):
    status, row = send(calm, {NAME: tensors[1][NAME]}, weight_version="some")
    assert status == 200 and row["version"] == "some" and row["verified"] == "incremental"
    mixed = copy_with(models[0], tmp_path, lambda t: t.update({NAME: tensors[1][NAME]}))
    assert row["root"] == root_of(read_checkpoint(mixed)) == served(calm)[1]


def test_begin_and_end_alone_change_nothing(calm):
    first = served(calm)
    assert calm.call("/begin_weight_update", {})[0] == 200
    status, row = calm.call("/end_weight_update", {})
    assert status == 200 and row["message"] == "nothing changed" and served(calm) == first
    status, row = calm.call("/end_weight_update", {})
    assert status == 400 and "no weight update was begun" in row["message"]


def test_a_second_update_is_a_409_while_one_is_begun(calm, models, tensors):
    assert calm.call("/begin_weight_update", {})[0] == 200
    for path, body in (
        ("/begin_weight_update", {}),
        ("/update_weights_from_disk", {"model_path": str(models[1])}),
        ("/prepare_weights", {"model_path": str(models[1])}),
        ("/update_weight_version", {"new_version": "x"}),
        ("/weights_checker", {"action": "checksum"}),
        ("/release_memory_occupation", {}),
    ):
        status, row = calm.call(path, body)
        assert status == 409 and "begin_weight_update is under way" in row["message"], path


def test_a_begun_update_that_nothing_comes_for_is_dropped(calm, tensors):
    first = served(calm)
    assert calm.call("/begin_weight_update", {})[0] == 200
    one, two = halves(tensors[1])
    assert send(calm, one)[0] == 200
    deadline = time.monotonic() + 20
    while calm.call("/weights_checker", {})[0] == 409:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    status, row = send(calm, two)  # must not become an update of its own
    assert status == 400 and "was dropped after 6 s" in row["message"]
    status, row = calm.call("/end_weight_update", {})
    assert status == 400 and "was dropped" in row["message"]
    assert served(calm) == first
    assert calm.call("/begin_weight_update", {})[0] == 200


def poisoned(tensor):
    bad = tensor.clone()
    bad[3, 3] = float("nan")
    return bad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"model.layers.1.mlp.fc1.weight": t[NAME]}, "fc1.weight is not a tensor of this model"),
        (lambda t: {NAME: t[NAME][:-1]}, "has shape [95, 64], the model's is [96, 64]"),
        (lambda t: {NAME: t[NAME].float()}, "is F32, which BF16 cannot hold"),
        (lambda t: {NAME: poisoned(t[NAME])}, f"{NAME} has 1 values that are NaN"),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
def test_faulty_tensors_are_refused_by_name_and_spoil_their_update(calm, tensors, change, message, begun):
    first = served(calm)
    if begun:
        assert calm.call("/begin_weight_update", {})[0] == 200
        assert send(calm, halves(tensors[1])[0])[0] == 200
    status, row = send(calm, change(tensors[1]))
    assert status == 400 and message in row["message"]
    if begun:
        status, row = calm.call("/end_weight_update", {})
        assert status == 400 and message in row["message"]
    assert served(calm) == first


def test_a_payload_that_is_no_tensor_is_refused(calm):
    first = served(calm)
    evil = base64.b64encode(b"cos\nsystem\n(S'true'\ntR.").decode()
    status, row = calm.call("/update_weights_from_tensor", {"serialized_named_tensors": [evil]})
    assert status == 400 and "os.system has no place" in row["message"]
    for body in ({}, {"serialized_named_tensors": []}, {"serialized_named_tensors": ["%"]}):
        assert calm.call("/update_weights_from_tensor", body)[0] == 400
    body = {"serialized_named_tensors": ["gA=="], "load_format": "pickle"}
    assert calm.call("/update_weights_from_tensor", body)[0] == 400
    assert served(calm) == first


def copy_with(model, folder, change):
    """A copy of a checkpoint whose tensors went through `change(dict)`."""
    target = folder / "changed"
    target.mkdir()
    copy_assets(model, target)
    held = load_file(model / "model.safetensors")
    change(held)
    save_file(held, target / "model.safetensors")
    return target


def test_a_truncated_file_and_a_missing_shard_are_refused(calm, models, tmp_path):
    first = served(calm)
    torn = copy_with(models[1], tmp_path, lambda _: None)
    content = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(content[: len(content) // 2])
    for path in ("/update_weights_from_disk", "/prepare_weights"):
        status, row = calm.call(path, {"model_path": str(torn)})
        assert status == 400 and not row["success"]
        (torn / "model.safetensors").write_bytes(content[:4])
    (torn / "model.safetensors").unlink()
    status, row = calm.call("/update_weights_from_disk", {"model_path": str(torn)})
    assert status == 400 and "model.safetensors is missing" in row["message"]
    assert served(calm) == first


def test_prepare_and_activate(calm, models, roots):
    first = served(calm)
    status, held = calm.call("/prepare_weights", {"model_path": str(models[1]), "weight_version": "p1"})
    assert status == 200 and (held["version"], held["root"]) == ("p1", roots[1]) and served(calm) == first
    status, row = calm.call("/activate_weights", {"prepared_id": "none"})
    assert status == 400 and held["prepared_id"] in row["message"]
    with ThreadPoolExecutor(1) as pool:
        flying = pool.submit(calm.generate, PROMPT, 400)
        calm.wait_for(lambda load: load["num_used_tokens"] >= 16)
        status, row = calm.call(
            "/activate_weights", {"prepared_id": held["prepared_id"], "flush_cache": False}
        )
        assert status == 200 and (row["version"], row["root"]) == ("p1", roots[1])
        assert row["num_paused_requests"] == 1 and 0 <= row["pause_s"] < 5
        versions = [v["version"] for v in flying.result(60)[1]["meta_info"]["weight_versions"]]
        assert versions == ["default", "p1"]
    status, row = calm.call("/activate_weights", {"prepared_id": held["prepared_id"]})
    assert status == 400 and "none is" in row["message"]
    updated = parts(calm.generate(PROMPT, 20))
    update(calm, models[1], "disk")
    assert parts(calm.generate(PROMPT, 20)) == updated


def test_a_newer_prepared_set_takes_the_place_of_the_older(calm, models, roots):
    first, second = (calm.call("/prepare_weights", {"model_path": str(m)})[1] for m in models)
    assert calm.call("/activate_weights", {"prepared_id": first["prepared_id"]})[0] == 400
    assert calm.call("/activate_weights", {"prepared_id": second["prepared_id"]})[1]["root"] == roots[1]


class Sender:
    """Rank 0 of a group as SGLang's trainers make it: torch's own constructor over a TCP store."""

    made = itertools.count()

    def __init__(self, server) -> None:
        name = f"group-{next(self.made)}"  # torch takes a name once in a process
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.limit, self.name = timedelta(seconds=20), name
        store = dist.TCPStore("127.0.0.1", port, 2, True, self.limit, wait_for_workers=False)
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(
                server.call, "/init_weights_update_group", body | {"group_name": name, "backend": "gloo"}
            )
            self.group, _ = dist.distributed_c10d._new_process_group_helper(
                2, 0, [], dist.Backend("gloo"), dist.PrefixStore(name, store), name, timeout=self.limit
            )
            assert joined.result(30)[0] == 200

    def broadcast(self, tensor):
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self.limit
        self.group.broadcast([tensor], options).wait(self.limit)

    def send(self, server, named, load_format=None, **more):
        body = {
            "names": list(named), "group_name": self.name, "load_format": load_format,
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in named.values()],
            "shapes": [list(t.shape) for t in named.values()],
        }  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.call, "/update_weights_from_distributed", body | more)
            for tensor in named.values() if load_format is None else [flattened(named)["flattened_tensor"]]:
                self.broadcast(tensor)
            return answer.result(30)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_weights_through_a_group(calm, tensors, roots, load_format):
    sender, other = Sender(calm), Sender(calm)
    assert calm.call("/begin_weight_update", {})[0] == 200
    one, two = halves(tensors[1])
    assert sender.send(calm, one, load_format)[0] == 200
    assert other.send(calm, two, load_format, weight_version="g1")[0] == 200
    assert calm.call("/end_weight_update", {})[1]["root"] == roots[1]
    assert served(calm) == ("g1", roots[1], "full")
    for name in (sender.name, other.name):
        assert calm.call("/destroy_weights_update_group", {"group_name": name})[0] == 200
    assert calm.call("/destroy_weights_update_group", {"group_name": sender.name})[0] == 400


def test_a_faulty_tensor_leaves_the_group_in_step(calm, tensors, roots):
    sender = Sender(calm)
    status, row = sender.send(calm, {NAME: poisoned(tensors[1][NAME])}, "flattened_bucket")
    assert status == 400 and "NaN" in row["message"]
    status, row = sender.send(calm, tensors[1], "flattened_bucket")
    assert status == 200 and row["root"] == roots[1]
    assert calm.call("/destroy_weights_update_group", {"group_name": sender.name})[0] == 200


def test_a_sender_that_stays_silent_loses_its_group(calm, tensors):
    first = served(calm)
    sender = Sender(calm)
    body = {"names": [NAME], "dtypes": ["bfloat16"], "shapes": [[96, 64]], "group_name": sender.name}
    status, row = calm.call("/update_weights_from_distributed", body)
    assert status == 400 and "the group is destroyed, the weights are as before" in row["message"]
    assert served(calm) == first
    status, row = calm.call("/update_weights_from_distributed", body)
    assert status == 400 and f"in no group {sender.name}" in row["message"]
    del sender


DYING = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
limit = timedelta(seconds=20)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, limit, wait_for_workers=False)
print("up", flush=True)
dist.distributed_c10d._new_process_group_helper(
    2, 0, [], dist.Backend("gloo"), dist.PrefixStore("dying", store), "dying", timeout=limit)
sys.stdin.read(1)
os._exit(1)
"""


def test_a_sender_that_dies_leaves_the_old_weights(calm):
    first = served(calm)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", DYING, str(port)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert sender.stdin is not None and sender.stdout is not None
    assert sender.stdout.readline() == b"up\n"
    member = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    assert (
        calm.call("/init_weights_update_group", member | {"group_name": "dying", "backend": "gloo"})[0] == 200
    )
    assert calm.call("/begin_weight_update", {})[0] == 200
    killer = threading.Timer(0.3, sender.stdin.close)
    killer.start()
    body = {"names": [NAME], "dtypes": ["bfloat16"], "shapes": [[96, 64]], "group_name": "dying"}
    status, row = calm.call("/update_weights_from_distributed", body)
    assert status == 400 and "nothing came through group dying" in row["message"]
    sender.wait(20)
    assert calm.call("/end_weight_update", {})[0] == 400
    assert served(calm) == first


BAD_GROUPS = [
    ({"backend": "nccl"}, "must be gloo"),
    ({"rank_offset": 2}, "lies outside a group of 2"),
    ({"master_port": 0}, "master_port"),
    ({"master_address": ""}, "master_address"),
]


@pytest.mark.parametrize(("change", "message"), BAD_GROUPS)
def test_groups_that_make_no_sense_are_refused(server, change, message):
    body = {
        "master_address": "127.0.0.1",
        "master_port": 9,
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
    }
    status, row = server.call("/init_weights_update_group", body | change)
    assert status == 400 and message in row["message"]


def test_a_broadcast_beyond_the_model_is_refused(server):
    sender = Sender(server)
    body = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1 << 40]], "group_name": sender.name}
    status, row = server.call("/update_weights_from_distributed", body)
    assert status == 400 and "one call may bring" in row["message"]
    assert server.call("/destroy_weights_update_group", {"group_name": sender.name})[0] == 200
    del sender


def test_tensors_by_name(calm, tensors):
    status, values = calm.call("/get_weights_by_name", {"name": NAME, "truncate_size": 3})
    assert status == 200 and values == tensors[0][NAME][:3].float().tolist()
    status, row = calm.call("/get_weights_by_name", {"name": "nothing"})
    assert status == 400 and "nothing is not a tensor" in row["error"]["message"]
    assert calm.call("/get_weights_by_name", {"name": NAME, "truncate_size": -1})[0] == 400


def check(server, action, **more):
    return server.call("/weights_checker", {"action": action} | more)


def test_the_checker_finds_an_update_that_left_a_tensor_out(calm, models, tensors, roots):
    digests = check(calm, "checksum")[1]
    assert digests["per_engine_checksum"] == roots[0] and set(digests["ranks"][0]["checksums"]) == set(
        tensors[0]
    )
    assert check(calm, "compare")[0] == 400  # no snapshot yet
    assert check(calm, "snapshot")[0] == 200
    assert check(calm, "reset_tensors")[0] == 200
    status, row = calm.generate(PROMPT, 4)
    assert status == 503 and "tensors were reset" in row["error"]["message"]
    assert calm.call("/weight_version")[0] == 503 and calm.call("/health_generate")[0] == 200
    status, row = send(calm, {n: t for n, t in tensors[0].items() if n != NAME})
    assert status == 400 and f"{NAME} is missing" in row["message"]
    status, row = check(calm, "compare")
    assert status == 400 and "other than in the snapshot" in row["message"]
    assert send(calm, tensors[0], weight_version="default")[0] == 200
    assert check(calm, "compare")[0] == 200
    assert check(calm, "checksum")[1]["per_engine_checksum"] == roots[0]
    assert check(calm, "snapshot")[0] == 200
    update(calm, models[1], "w")
    status, row = check(calm, "compare", skip_tensor_list=["layers.0", "embed"])
    assert status == 400 and "layers.1" in row["message"] and "layers.0" not in row["message"]
    assert check(calm, "wipe")[0] == 400


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """An engine whose weights and KV cache are much larger than the noise of a process's memory."""
    root = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64}
    model = make_model(root / "m", "llama", torch.bfloat16, 0, **sizes)
    flags = ("--max-total-tokens", "16384", "--max-running-requests", "8", "--max-step-tokens", "512")
    with engine(model, root, *flags) as process:
        process.model = model  # type: ignore[attr-defined]
        yield process
        assert process.stop() == 0


def test_wgt_22_released_memory_is_really_free_and_stale_weights_are_not_served(large):
    with ThreadPoolExecutor(8) as pool:  # touches most of the cache
        list(pool.map(lambda i: large.generate([3 + i] + [5] * 400, 100), range(32)))
    before, root = parts(large.generate(PROMPT, 8)), served(large)[1]
    for tag in ("weights", "kv_cache"):
        status, row = large.call("/release_memory_occupation", {"tags": [tag]})
        assert status == 200, row
        freed = row["freed_bytes"][tag]
        assert freed > 8 << 20
        share = 0.9 if tag == "weights" else 0.2  # pages of the cache that were never used were never there
        assert row["fell_bytes"] > share * freed
        assert large.call("/release_memory_occupation", {"tags": [tag]})[1]["freed_bytes"] == {tag: 0}
    assert large.call("/health")[0] == 200 and large.call("/health_generate")[0] == 200
    status, row = large.generate(PROMPT, 4)
    assert status == 503 and "memory is released: weights, kv_cache" in row["error"]["message"]
    assert large.call("/weight_version")[0] == 503
    status, row = large.call("/update_weights_from_disk", {"model_path": str(large.model)})
    assert status == 400 and "resume it before an update" in row["message"]
    assert large.call("/get_weights_by_name", {"name": NAME})[0] == 400
    assert large.call("/weights_checker", {})[0] == 400
    status, row = large.call("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert status == 400 and "cuda_graph: is not released" in row["message"]
    assert large.call("/resume_memory_occupation", {"tags": ["kv_cache"]})[1]["resumed"] == ["kv_cache"]
    assert large.generate(PROMPT, 4)[0] == 503
    assert large.call("/resume_memory_occupation", {})[1]["resumed"] == ["weights"]
    status, row = large.generate(PROMPT, 4)
    assert status == 503 and "a full update is needed" in row["error"]["message"]
    status, row = send(large, {NAME: torch.zeros(1024, 256, dtype=torch.bfloat16)})
    assert status == 400 and "is missing" in row["message"]
    assert update(large, large.model, "default")["root"] == root
    assert parts(large.generate(PROMPT, 8)) == before
    assert large.call("/resume_memory_occupation", {}) == (
        200, {"success": True, "message": "resumed", "resumed": []},
    )  # fmt: skip
    assert large.call("/release_memory_occupation", {"tags": ["disk"]})[0] == 400


def test_release_is_refused_while_requests_run_or_wait(calm):
    with ThreadPoolExecutor(1) as pool:
        flying = pool.submit(calm.generate, PROMPT, 300)
        calm.wait_for(lambda load: load["num_running_reqs"] == 1)
        status, row = calm.call("/release_memory_occupation", {})
        assert status == 400 and "1 requests run" in row["message"]
        assert calm.call("/weights_checker", {"action": "reset_tensors"})[0] == 400
        assert len(parts(flying.result(60))[0]) == 300


def test_two_ranks_take_tensors_and_give_memory_back(models, tensors, roots, tmp_path):
    with engine(models[0], tmp_path, "--tp-size", "2") as sharded:
        before = parts(sharded.generate(PROMPT, 8))
        assert send(sharded, tensors[1], "flattened_bucket")[1]["root"] == roots[1]
        assert parts(sharded.generate(PROMPT, 8)) != before
        status, row = sharded.call("/release_memory_occupation", {})
        assert status == 200 and min(row["freed_bytes"][tag] for tag in ("weights", "kv_cache")) > 0
        assert sharded.generate(PROMPT, 8)[0] == 503
        assert sharded.call("/resume_memory_occupation", {})[1]["resumed"] == [
            "weights",
            "kv_cache",
            "cuda_graph",
        ]
        assert update(sharded, models[0], "default")["root"] == roots[0]
        assert parts(sharded.generate(PROMPT, 8)) == before
        assert sharded.stop() == 0


def test_all_of_it_needs_the_token(models, tmp_path):
    with engine(models[0], tmp_path, env={"TURNOUT_ENGINE_ADMIN_TOKEN": "secret"}) as guarded:
        assert guarded.generate(PROMPT, 2)[0] == 200
        for path in (
            "/begin_weight_update", "/end_weight_update", "/update_weights_from_tensor",
            "/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group",
            "/prepare_weights", "/activate_weights", "/update_weights_from_disk", "/update_weight_version",
            "/release_memory_occupation", "/resume_memory_occupation", "/get_weights_by_name", "/weights_checker",
        ):  # fmt: skip
            assert guarded.call(path, {})[0] == 401, path
            assert guarded.call(path, {}, token="secret")[0] != 401, path
