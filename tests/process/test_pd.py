"""A PD pair of two processes against one regular engine: same tokens, same log-probs, no prompt computed twice."""

from __future__ import annotations

import pytest
import torch

from tests.engine_models import make_model
from tests.engine_process import engine, parts
from tests.pd_pair import FLAGS, info, pair, prompt_rows

# layers, kv heads, head_dim, tokens of a page, padded head_dim of tests.engine_models
PAGE_ELEMENTS = 2 * 2 * (16 * 16 + 16 * 16)
PROMPTS = [[(7 * i * (k + 3)) % 300 + 5 for i in range(5 + 23 * k)] for k in range(6)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transfer", ["auto", "tcp"])
def test_a_pair_answers_as_one_engine_does_and_moves_exact_bytes(tmp_path, dtype, transfer):
    model = make_model(tmp_path / "model", dtype=DTYPES[dtype])
    with (
        engine(model, tmp_path, *FLAGS, "--dtype", dtype) as single,
        pair(model, tmp_path / "pair", "--dtype", dtype, "--disaggregation-transfer", transfer) as split,
    ):
        assert len({single.ready["pid"], split.prefill.ready["pid"], split.decode.ready["pid"]}) == 3
        path = "shm" if transfer == "auto" else "tcp"
        moved = 0
        for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}):
            bodies = [split.body(ids, 12, **sampling) for ids in PROMPTS]
            sent = [split.send(body) for body in bodies]  # all at once
            for ids, body, (first, answer) in zip(PROMPTS, bodies, sent):
                row = {key: value for key, value in body.items() if not key.startswith("bootstrap")}
                whole = parts(single.call("/generate", row))
                assert parts(answer.result(60)) == whole
                assert parts(first.result(60)) == (whole[0][:1], whole[1][:1])
                pages = -(-len(ids) // 16)
                size = pages * PAGE_ELEMENTS * DTYPES[dtype].itemsize
                moved += size
                for future in (first, answer):
                    meta = future.result()[1]["meta_info"]
                    assert (meta["pd_transfer_bytes"], meta["pd_transfer_path"]) == (size, path)
                    assert (meta["pd_prefill_engine"], meta["pd_decode_engine"]) == ("prefill", "decode")
        assert prompt_rows(split.decode) == 0 < prompt_rows(split.prefill)
        for side in (split.prefill, split.decode):
            row = info(side)
            assert row["disaggregation"][f"bytes_{path}"] == moved
            assert row["disaggregation"]["transfers"] == 2 * len(PROMPTS)
            assert row["disaggregation"]["aborted"] == 0
        assert info(split.prefill)["disaggregation_mode"] == "prefill"
        assert info(split.decode)["disaggregation_mode"] == "decode"
        split.idle()


def test_the_prefix_cache_works_on_the_prefill_side_and_changes_no_bit(tmp_path):
    model = make_model(tmp_path / "model")
    ids = PROMPTS[5]
    with (
        engine(model, tmp_path, *FLAGS, "--dtype", "float32") as single,
        pair(model, tmp_path / "pair", "--dtype", "float32") as split,
    ):
        sent = [split.send(split.body(ids, 6, sampling_seed=seed)) for seed in range(6)]
        answers = [(first.result(60), answer.result(60)) for first, answer in sent]
        for seed, (_, answer) in enumerate(answers):
            assert parts(answer) == parts(single.generate(ids, 6, sampling_seed=seed))
        cached = [first[1]["meta_info"]["cached_tokens"] for first, _ in answers]
        assert max(cached) == len(ids) // 16 * 16
        assert prompt_rows(split.prefill) + sum(cached) == 6 * len(ids) and prompt_rows(split.decode) == 0


def test_a_first_token_that_is_the_last_ends_both_sides_without_decoding(tmp_path):
    model = make_model(tmp_path / "model")
    with (
        engine(model, tmp_path, *FLAGS, "--dtype", "float32") as single,
        pair(model, tmp_path / "pair", "--dtype", "float32") as split,
    ):
        token = parts(single.generate(PROMPTS[2], 1))[0][0]
        for changes, reason in (
            ({"new": 1}, {"type": "length", "length": 1}),
            ({"new": 9, "stop_token_ids": [token]}, {"type": "stop"}),
        ):
            first, answer = split.send(split.body(PROMPTS[2], **changes))
            for future in (first, answer):
                assert parts(future.result(60))[0] == [token]
                meta = future.result()[1]["meta_info"]
                assert {k: v for k, v in meta["finish_reason"].items() if k in reason} == reason
                assert (meta["pd_transfer_bytes"], meta["pd_transfer_path"]) == (0, "none")
        assert info(split.decode)["internal_states"][0]["steps"] == 0
        split.idle()


def test_a_seed_that_was_not_asked_for_is_the_prefill_sides(tmp_path):
    """Both halves draw one when none is given; all tokens must come from one of them."""
    model = make_model(tmp_path / "model")
    with pair(model, tmp_path / "pair", "--dtype", "float32") as split:
        tokens = parts(split.generate(PROMPTS[1], 10, sampling_seed=None, temperature=1.0))[0]
        assert len(tokens) == 10
        for wrong in ({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}, {"input_ids": [5]}):
            for side in (split.prefill, split.decode):
                status, row = side.call("/generate", wrong)
                assert status == 400 and "bootstrap_room" in row["error"]["message"]
        for name, value in (("bootstrap_room", -1), ("bootstrap_room", 2**63), ("bootstrap_port", 0)):
            status, row = split.decode.call("/generate", split.body([5, 6]) | {name: value})
            assert status == 400 and name in row["error"]["message"]
        split.idle()
