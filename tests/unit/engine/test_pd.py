"""A PD pair inside one process: equal results, and every failure at every phase."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine_models import make_model
from tests.pd_inside import pair, side

LONG = [(11 * i) % 300 + 5 for i in range(75)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("pd") / "model")


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


def ids_of(row: Any) -> tuple[list[int], list[float]]:
    pairs = row["meta_info"]["output_token_logprobs"]
    assert [p[1] for p in pairs] == row["output_ids"]
    return row["output_ids"], [p[0] for p in pairs]


def finish(row: Any) -> tuple[str, str]:
    reason = row["meta_info"]["finish_reason"]
    return reason["type"], reason.get("message", "")


async def whole(model, body: dict[str, Any]) -> tuple[list[int], list[float]]:
    async with side(model, "null") as single:
        status, row = await single.generate({k: v for k, v in body.items() if "bootstrap" not in k})
    assert status == 200
    return ids_of(row)


def test_a_pair_answers_as_one_engine_does(model):
    async def scenario() -> None:
        async with pair(model) as split:
            for transfer in ("shm", "tcp"):
                split.decode.compute.settings.__dict__["disaggregation_transfer"] = (
                    "auto" if transfer == "shm" else "tcp"
                )
                body = split.body(LONG, 12)
                first, answer = await split.generate(body)
                assert ids_of(answer) == await whole(model, body)
                assert ids_of(first) == tuple(part[:1] for part in ids_of(answer))
                assert answer["meta_info"]["pd_transfer_path"] == transfer
            assert split.decode.compute.load.prompt_rows == 0

    run(scenario())
