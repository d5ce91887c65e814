"""When digests are recomputed in the background, and what an audit does with what it finds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests.engine_models import make_model
from tests.unit.engine.test_weights import core_on, generate
from turnout.core.errors import ConfigError, EngineBusy
from turnout.engine.audits import Audits
from turnout.engine.settings import EngineSettings

INTERVAL = 3


class Counted:
    """A compute whose audits are counted; each lasts until it is let go."""

    def __init__(self, interval=INTERVAL):
        self.settings = SimpleNamespace(digest_audit_interval=interval)
        self.audits, self.go = 0, asyncio.Event()
        self.core = SimpleNamespace(weights=SimpleNamespace(audit=self.audit))
        self.loop = asyncio.get_running_loop()

    def audit(self, stop):
        self.audits += 1
        asyncio.run_coroutine_threadsafe(self.go.wait(), self.loop).result(10)
        return -1

    async def do(self, work, deadline_s):
        return None


async def settled():
    for _ in range(50):
        await asyncio.sleep(0.002)


def test_audits_run_at_the_first_incremental_update_and_after_every_interval():
    async def scenario():
        compute = Counted()
        compute.go.set()
        audits = Audits(compute)
        seen = []
        for _ in range(2 * INTERVAL + 1):
            audits.updated("incremental")
            await settled()
            seen.append(compute.audits)
        assert seen == [1, 1, 1, 2, 2, 2, 3]
        audits.updated("full")  # all was read: counting starts anew
        for _ in range(INTERVAL - 1):
            audits.updated("incremental")
        await settled()
        assert compute.audits == 3
        audits.updated("incremental")
        audits.failed()
        await settled()
        assert compute.audits in (4, 5)
        await audits.stop()

    asyncio.run(scenario())


def test_one_at_a_time_and_none_where_it_is_switched_off():
    async def scenario():
        compute = Counted()
        audits = Audits(compute)
        for _ in range(5):
            audits.failed()
            await asyncio.sleep(0.005)
        assert compute.audits == 1
        compute.go.set()
        await settled()
        assert compute.audits == 2  # once more for all that came meanwhile
        await audits.stop()
        off = Audits(Counted(0))
        off.failed()
        off.updated("incremental")
        await settled()
        assert off._compute.audits == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("good", [True, False])
def test_what_an_audit_finds_is_attested_or_fences(tmp_path, good):
    core = core_on(make_model(tmp_path / "m", "llama", torch.bfloat16, 0))
    core.attested = type(core.attested)(
        core.attested.version, core.attested.root, 0.0, verified="incremental"
    )
    if not good:
        core.weights.storage.live("norm")[3] += 1

    class Compute:
        settings = SimpleNamespace(digest_audit_interval=1)

        def __init__(self):
            self.core = core

        async def do(self, work, deadline_s):
            return work(core)

    async def scenario():
        audits = Audits(Compute())
        audits.failed()
        await audits._task

    asyncio.run(scenario())
    if good:
        assert core.attested.verified == "full" and core.attested.at > 0 and core.fenced is None
        return
    assert core.attested.version == "unknown" and "model.norm.weight" in (core.fenced or "")
    with pytest.raises(EngineBusy, match="unknown weights"):
        generate(core)


def test_a_fence_ends_what_runs_without_another_token(tmp_path):
    from turnout.engine.request_machine import Request
    from turnout.protocol.sglang import SamplingParams

    core = core_on(make_model(tmp_path / "m", "llama", torch.bfloat16, 0))
    request = Request("r", [5, 6, 7], SamplingParams(max_new_tokens=50, ignore_eos=True), seed=4)
    core.submit(request)
    for _ in range(4):
        core.step()
    made = request.generated
    core.fence("planted")
    assert not core.step() and request.generated == made > 0
    assert request.finish is not None and "unknown weights: planted" in request.message
    core.check()


def test_the_interval_is_checked(tmp_path):
    with pytest.raises(ConfigError, match="digest_audit_interval"):
        EngineSettings(tmp_path, digest_audit_interval=-1)
