"""A PD pair of two processes: what a single engine answers, bit for bit, and SIGKILL of either at each phase."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_models import make_model
from tests.engine_process import EngineProcess, parts, serving
from tests.pd_pair import FLAGS, Pair, info, pair, prompt_rows, start_half

# layers x kv heads x (head_dim x tokens of a page, both ways; head_dim needs no padding) of tests.engine_models
PAGE_ELEMENTS = 2 * 2 * (16 * 16 + 16 * 16)
PROMPTS = [[(7 * i * (k + 3)) % 300 + 5 for i in range(5 + 23 * k)] for k in range(6)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize(("dtype", "transfer"), [("float32", "auto"), ("bfloat16", "tcp")])
def test_a_pair_answers_as_one_engine_does_and_moves_exact_bytes(tmp_path, dtype, transfer):
    model = make_model(tmp_path / "model", dtype=DTYPES[dtype])
    flags = ("--dtype", dtype)
    started = EngineProcess(model, tmp_path, *FLAGS, *flags)
    with (
        pair(model, tmp_path / "pair", *flags, "--disaggregation-transfer", transfer) as split,
        serving(started) as [single],
    ):
        path = "shm" if transfer == "auto" else "tcp"
        assert len({single.ready["pid"], split.prefill.ready["pid"], split.decode.ready["pid"]}) == 3
        moved = sum(
            check_equal(split, single, path, dtype, sampling)
            for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40})
        )
        assert prompt_rows(split.decode) == 0 < prompt_rows(split.prefill)
        for side, mode in ((split.prefill, "prefill"), (split.decode, "decode")):
            row = info(side)
            counts = row["disaggregation"]
            assert row["disaggregation_mode"] == mode
            assert (counts[f"bytes_{path}"], counts["transfers"]) == (moved, 2 * len(PROMPTS))
            assert counts["aborted"] == 0
        check_prefix(split, single)
        check_one_token(split, single)
        split.idle()


def check_equal(split: Pair, single: EngineProcess, path: str, dtype: str, sampling: dict[str, Any]) -> int:
    """All prompts at once; returns the KV bytes that moved."""
    bodies = [split.body(ids, 12, **sampling) for ids in PROMPTS]
    sent = [split.send(body) for body in bodies]
    moved = 0
    for ids, body, (first, answer) in zip(PROMPTS, bodies, sent):
        row = {key: value for key, value in body.items() if not key.startswith("bootstrap")}
        whole = parts(single.call("/generate", row))
        assert parts(answer.result(60)) == whole
        assert parts(first.result(60)) == (whole[0][:1], whole[1][:1])
        size = -(-len(ids) // 16) * PAGE_ELEMENTS * DTYPES[dtype].itemsize
        moved += size
        for future in (first, answer):
            meta = future.result()[1]["meta_info"]
            assert (meta["pd_transfer_bytes"], meta["pd_transfer_path"]) == (size, path)
            assert (meta["pd_prefill_engine"], meta["pd_decode_engine"]) == ("prefill", "decode")
    return moved


def check_prefix(split: Pair, single: EngineProcess) -> None:
    """The prefix cache works on the prefill side and changes no bit."""
    ids, before = [9, *PROMPTS[5]], prompt_rows(split.prefill)
    sent = [split.send(split.body(ids, 6, sampling_seed=seed, temperature=1.0)) for seed in range(6)]
    answers = [(first.result(60), answer.result(60)) for first, answer in sent]
    for seed, (_, answer) in enumerate(answers):
        assert parts(answer) == parts(single.generate(ids, 6, sampling_seed=seed, temperature=1.0))
    cached = [first[1]["meta_info"]["cached_tokens"] for first, _ in answers]
    assert max(cached) == len(ids) // 16 * 16
    assert prompt_rows(split.prefill) - before + sum(cached) == 6 * len(ids)
    assert prompt_rows(split.decode) == 0


def check_one_token(split: Pair, single: EngineProcess) -> None:
    """A first token that is the last ends both sides; nothing is decoded."""
    steps = info(split.decode)["internal_states"][0]["steps"]
    token = parts(single.generate(PROMPTS[2], 1))[0][0]
    for changes, kind in (
        ({"new": 1}, "length"),
        ({"new": 9, "stop_token_ids": [token], "ignore_eos": False}, "stop"),
    ):
        for future in split.send(split.body(PROMPTS[2], **changes)):
            assert parts(future.result(60))[0] == [token]
            meta = future.result()[1]["meta_info"]
            assert meta["finish_reason"]["type"] == kind
            assert (meta["pd_transfer_bytes"], meta["pd_transfer_path"]) == (0, "none")
    assert info(split.decode)["internal_states"][0]["steps"] == steps


CASES = [(who, when) for who in ("prefill", "decode") for when in ("prefill", "transfer", "decode")]


def shared_memory(side: EngineProcess) -> list[str]:
    """What this process holds of the memory that KV moves through, and names left for it."""
    folder = Path(f"/proc/{side.ready['pid']}")
    # one that is closed meanwhile stays its own name
    fds = [os.path.realpath(fd) for fd in (folder / "fd").iterdir()]
    maps = (folder / "maps").read_text().splitlines()
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [line for line in (*fds, *maps, *names) if "turnout-kv" in line or "turnout-pd" in line]


def finish(reply: tuple[int, Any]) -> str:
    status, row = reply
    assert status == 200, row
    return row["meta_info"]["finish_reason"]["type"]


def kill(side: EngineProcess) -> None:
    side.process.send_signal(signal.SIGKILL)
    side.process.wait(30)


def phase(split: Pair, name: str) -> tuple[Any, Any]:
    """A request of 200 tokens brought to a phase, by pausing the side that would take it on."""
    if name in ("prefill", "transfer"):
        side = split.prefill if name == "prefill" else split.decode
        assert side.call("/pause_generation", {"mode": "in_place"})[0] == 200
    calls = split.send(split.body(PROMPTS[4], 250))
    if name == "prefill":  # both have it, the prompt is not computed
        for side in (split.prefill, split.decode):
            side.wait_for(lambda load: load["num_total_reqs"] == 1)
        time.sleep(0.2)
    elif name == "transfer":  # the KV is held over there, no page of the decode side is free for it
        held = -(-len(PROMPTS[4]) // 16) * 16
        split.prefill.wait_for(lambda load: load["num_used_tokens"] == held)
        time.sleep(0.2)
    else:
        split.decode.wait_for(lambda load: load["num_running_reqs"] == 1)
        assert finish(calls[0].result(60)) == "length"
    return calls


def test_kill_9_of_either_side_at_each_phase(tmp_path):
    """The survivor ends its half as an abort at once, returns all memory, and works on with a new other half."""
    model = make_model(tmp_path / "model")
    float32 = ("--dtype", "float32")
    others = [start_half(model, tmp_path / f"{at}", who, *float32) for at, (who, _) in enumerate(CASES[:-1])]
    with pair(model, tmp_path / "pair", *float32) as split, serving(*others):
        for number, (who, when) in enumerate(CASES):
            calls = phase(split, when)
            victim = getattr(split, who)
            survivor = split.decode if who == "prefill" else split.prefill
            kill(victim)
            reply = calls[1 if who == "prefill" else 0].result(60)
            if (who, when) == ("prefill", "decode"):  # all that the decode side needs had come
                assert finish(reply) == "length" and len(reply[1]["output_ids"]) == 250
            elif (who, when) == ("decode", "decode"):
                assert finish(reply) == "length" and len(reply[1]["output_ids"]) == 1
            else:
                assert finish(reply) == "abort" and len(reply[1]["output_ids"]) <= 1
            survivor.call("/continue_generation", {})
            split.idle(survivor)
            assert not shared_memory(survivor)
            if number == len(CASES) - 1:
                break
            setattr(split, who, others[number])
            assert len(parts(split.generate(PROMPTS[3], 5))[0]) == 5
            split.idle()
