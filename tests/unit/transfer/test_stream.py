"""Versions through shared memory: what engines are sent, what real torch reads, what a failure leaves behind."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_engine import RESET, Answer, ScriptedEngine
from tests.unit.rollout.parts import Log
from tests.weight_files import as_rows, assets, model
from turnout.core.errors import WeightError
from turnout.core.events import VersionAborted
from turnout.core.version import WeightVersion
from turnout.engine.tensor_wire import FLATTENED, read_payload
from turnout.placement.real import DiskStore, RealClock
from turnout.placement.shared_memory import FOLDER, sweep
from turnout.serving.weights_client import OnUpdate
from turnout.transfer.segment import Segment
from turnout.transfer.tensor import TensorTransport, flattened_bucket
from turnout.transfer.updater import Updater
from turnout.weights.buckets import buckets, pack
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore

BASE = WeightVersion(0, 0, root_of(model(0)))
BEGIN, TENSOR, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
FINE = Answer(body={"success": True, "message": ""})


def segments() -> list[str]:
    return [path.name for path in FOLDER.glob(f"turnout_{os.getpid()}_*")]


class Receiver(ScriptedEngine):
    """Reads what is sent as the embedded engine does, while it may be read."""

    def _behave(self, path: str, body: dict[str, Any]) -> Any:
        if path == BEGIN:
            self.held: list[Any] = []
        if path == TENSOR:
            found = read_payload(body["serialized_named_tensors"], body["load_format"])
            self.held += [(t.name, t.dtype, t.shape, t.bits.copy()) for t in found]
            self.label = body.get("weight_version", self.label)
        if path == END and not body.get("abort"):
            self.root = root_of(type(model()[0])(*row) for row in self.held)
        return FINE if path in (BEGIN, TENSOR, END) else super()._behave(path, body)


def on(folder: Path, use: Callable[[Updater, list[Receiver], Log], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Receiver("e0") as one, Receiver("e1") as two:
            store = WeightStore(folder / "w", DiskStore(), assets(folder / "assets"), 200)
            store.open("run", 0, BASE.root)
            for engine in (one, two):
                engine.root = BASE.root
            log, clock = Log(), RealClock()
            clients = [engine.client(clock) for engine in (one, two)]
            updater = Updater(TensorTransport(store, clock, 40), clients, log, clock)
            await updater.adopt(BASE, 20.0)
            await asyncio.wait_for(use(updater, [one, two], log), 30)
            assert len(segments()) <= 1  # kept for the next update
            await updater.transport.close()

    asyncio.run(main())
    assert segments() == []


async def update(updater: Updater, seed: int) -> WeightVersion:
    begun = updater.begin(lambda: model(seed), seed, 20.0)
    await begun.publish()
    await begun.prepare()
    return await begun.commit()


def test_every_bucket_reaches_every_engine_and_the_last_one_names_the_version(tmp_path: Path) -> None:
    async def use(updater: Updater, engines: list[Receiver], _: Log) -> None:
        version = await update(updater, 1)
        assert version == updater.current == WeightVersion(0, 1, root_of(model(1)))
        for engine in engines:
            assert len(engine.sent(BEGIN)) == len(engine.sent(END)) == 1
            sent = engine.sent(TENSOR)
            assert len(sent) > 2 and (engine.root, engine.label) == (version.root, version.label)
            assert [body.get("weight_version") for body in sent] == [None] * (len(sent) - 1) + [version.label]
            assert [body["flush_cache"] for body in sent] == [False] * (len(sent) - 1) + [True]
        assert (await update(updater, 2)).counter == 2

    on(tmp_path, use)


def handles(engine: Receiver) -> list[bytes]:
    """The name of the segment of each bucket that the engine was sent."""
    found = [base64.b64decode(body["serialized_named_tensors"][0]) for body in engine.sent(TENSOR)]
    return [re.findall(rb"/turnout_[0-9a-f_]+", content)[0] for content in found]


def test_a_segment_is_kept_while_it_fits_and_readers_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(updater: Updater, engines: list[Receiver], _: Log) -> None:
        await update(updater, 1)
        (kept,) = segments()
        (FOLDER / kept).unlink()  # as torch does where a process of its own ends
        await update(updater, 2)
        (other,) = segments()
        before = len(engines[0].sent(TENSOR))
        await update(updater, 3)
        assert {name.decode() for name in handles(engines[0])[before:]} == {f"/{other}"}
        assert other != kept and segments() == [other]
        monkeypatch.setattr("turnout.transfer.tensor.SEGMENT_BYTES", 1)
        await update(updater, 4)  # its segment is larger than what may stay
        assert segments() == [] and updater.current == WeightVersion(0, 4, root_of(model(4)))

    on(tmp_path, use)


@pytest.mark.parametrize("policy", OnUpdate)
def test_the_last_bucket_says_what_becomes_of_requests_in_flight(policy: OnUpdate, tmp_path: Path) -> None:
    async def use(updater: Updater, engines: list[Receiver], _: Log) -> None:
        updater.transport.on_update = policy  # type: ignore[attr-defined]
        await update(updater, 1)
        *before, last = engines[0].sent(TENSOR)
        assert {(body["flush_cache"], body["abort_all_requests"]) for body in before} == {(False, False)}
        want = {
            "flush_cache": policy is not OnUpdate.CONTINUE,
            "abort_all_requests": policy is OnUpdate.ABORT,
        }
        assert {key: last[key] for key in want} == want

    on(tmp_path, use)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (BEGIN, Answer(409, {"success": False, "message": "one is under way"})),
        (TENSOR, Answer(400, {"success": False, "message": "NaN"})),
        (TENSOR, Answer(200, {"success": False, "message": "no"})),
        (TENSOR, RESET),
        (END, Answer(500, b"boom")),
        ("/weight_version", Answer(200, {"version": "v", "root": "f" * 32, "level": "memory"})),
    ],
)
def test_a_failure_of_one_engine_ends_the_update_for_both_and_leaves_no_segment(
    path: str, answer: Answer, tmp_path: Path
) -> None:
    async def use(updater: Updater, engines: list[Receiver], log: Log) -> None:
        engines[1].script(path, answer)
        with pytest.raises(WeightError, match="weight update aborted"):
            await update(updater, 1)
        activated = path not in (BEGIN, TENSOR)
        assert updater.current == BASE
        assert updater.fleet.fenced == ({"e0", "e1"} if activated else {"e1"})
        assert len(log.of(VersionAborted)) == 1
        if path in (BEGIN, TENSOR):
            assert engines[0].sent(END)[-1] == {"abort": True}
            assert segments() == []
        assert (await update(updater, 1)).counter == 2  # nothing is wedged

    on(tmp_path, use)


def test_a_segment_that_does_not_fit_is_a_weight_error() -> None:
    with pytest.raises(WeightError, match="bytes of shared memory"):
        Segment(1 << 50)
    assert segments() == []


def test_segments_of_the_dead_are_swept_and_those_of_the_living_stay() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = FOLDER / f"turnout_{ended.pid}_0123456789abcdef"
    left.write_bytes(b"x")
    mine = Segment(8)
    assert left.name in sweep() and not left.exists()
    assert len(segments()) == 1
    mine.close()


READER = """
import pickle, sys, torch
found = pickle.load(sys.stdin.buffer)
for part in found["metadata"]:
    flat = found["flattened_tensor"][part.start_idx:part.end_idx].view(part.dtype).reshape(part.shape)
    print(bytes(flat.reshape(-1).view(torch.uint8).tolist()).hex())
"""


def test_torch_itself_reads_the_handles(tmp_path: Path) -> None:
    """As a stock SGLang does: torch's own functions by name, no class of ours."""
    (bucket,) = buckets([t for t in model(3) if t.dtype == "BF16" and t.bits.size], 1 << 20)
    segment = Segment(sum(tensor.nbytes for tensor in bucket))
    payload = flattened_bucket(segment, pack(bucket, segment.data))
    assert as_rows(read_payload([payload], FLATTENED)) == as_rows(bucket)
    content = base64.b64decode(payload)
    assert b"turnout.transfer" not in content
    command = [sys.executable, "-c", READER]
    ended = subprocess.run(command, input=content, capture_output=True, check=True, timeout=60)
    lines = ended.stdout.decode().splitlines()
    assert lines == [tensor.bits.tobytes().hex() for tensor in bucket]
    segment.close()  # the name may be gone: the manager of a torch process that ends removes what it had opened
    assert segments() == []
