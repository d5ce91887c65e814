"""Two real ranks of a trainer: the calls of TrainBackend, what fails, how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.process.run_process import ROOT, environment, gone_within, processes_of
from tests.train_models import batch_of, make_model, make_samples, settings_for
from turnout.core.errors import ModelError, TrainerLost
from turnout.placement.real import RealClock
from turnout.placement.shared_memory import FOLDER, sweep
from turnout.train.local import LocalBackend
from turnout.train.rank_launch import RankPlan, Ranks, start_ranks
from turnout.train.ranks import RankedBackend

START_S = 180.0


def test_two_ranks_are_one_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment with proxies for everything; and a rank that stands still is named at the deadline."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://[::1]:9")
    settings = replace(settings_for(make_model(tmp_path / "model")), threads=1)
    alone, batch = LocalBackend(settings), batch_of(make_samples())
    other = LocalBackend(replace(settings, checkpoint=make_model(tmp_path / "qwen3", kind="qwen3")))
    for name, backend in (("alone", alone), ("other", other)):
        (tmp_path / name).mkdir()
        backend.save(tmp_path / name)

    async def calls(ranks: Ranks) -> None:
        both = await asyncio.to_thread(RankedBackend, replace(settings, ranks=2), ranks)
        report, expected = await asyncio.to_thread(both.train, batch), alone.train(batch)
        assert report.loss == pytest.approx(expected.loss, abs=1e-6) and report.tokens == expected.tokens
        assert both.steps_done == 1
        exported = list(both.export())
        assert [(t.name, t.dtype, t.shape) for t in exported] == [
            (t.name, t.dtype, t.shape) for t in alone.export()
        ]
        for mine, theirs in zip(exported, alone.export()):
            assert np.allclose(mine.bits.view(np.float32), theirs.bits.view(np.float32), atol=1e-5), mine.name
        found, wanted = both.logprobs(batch.samples), alone.logprobs(batch.samples)
        assert all(np.allclose(one, two, atol=1e-5) for one, two in zip(found, wanted)) and len(found) == len(
            wanted
        )

        with pytest.raises(ModelError) as refused:
            both.load(tmp_path / "other")
        assert "resume with the same model" in str(refused.value)
        both.load(tmp_path / "alone")
        assert both.steps_done == 0
        (tmp_path / "both").mkdir()
        both.save(tmp_path / "both")
        alone.load(tmp_path / "both")
        writes = await asyncio.to_thread(both.copied)
        (tmp_path / "beside").mkdir()
        writing = asyncio.create_task(asyncio.to_thread(writes, tmp_path / "beside"))
        await asyncio.to_thread(both.train, batch)  # changes what is copied
        await writing
        alone.load(tmp_path / "beside")
        assert (both.steps_done, alone.steps_done) == (1, 0)
        with pytest.raises(OSError, match="no such folder"):
            await asyncio.to_thread(await asyncio.to_thread(both.copied), tmp_path / "no such folder")

        ranks.plan = replace(ranks.plan, deadline_s=1.0)
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        with pytest.raises(TrainerLost) as lost:
            await asyncio.to_thread(both.train, batch)
        assert "in phase 'train': no answer within 1 s of trainer rank 1 (cpu:1): process" in str(lost.value)
        assert "is stopped (SIGSTOP)" in str(lost.value) and "rank 0" not in str(lost.value)

    async def run() -> None:
        ranks = await start_ranks(RankPlan(2, 1, tmp_path / "trainer", START_S), RealClock())
        try:
            await calls(ranks)
        finally:
            await ranks.stop()
        assert not ranks.file.exists()

    asyncio.run(run())
    assert processes_of(tmp_path) == []


def test_ranks_that_are_killed_are_told_at_once(tmp_path: Path) -> None:
    async def killed() -> None:
        ranks = await start_ranks(RankPlan(2, 1, tmp_path / "trainer", START_S), RealClock())
        ending = asyncio.ensure_future(ranks.ended())
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGKILL)
        assert "killed by SIGKILL" in await asyncio.wait_for(ending, 20)
        with pytest.raises(TrainerLost) as lost:
            await asyncio.to_thread(RankedBackend, settings_for(tmp_path), ranks)
        first = ranks.processes[0].pid
        assert f"'meet': process {first} of trainer rank 0 (cpu:0) ended: killed by SIGKILL" in str(
            lost.value
        )
        await ranks.stop()

    asyncio.run(killed())
    assert processes_of(tmp_path) == []


ORPHANS = """
import asyncio, os, signal, sys
from pathlib import Path
from turnout.placement.real import RealClock
from turnout.train.rank_launch import RankPlan, start_ranks
async def main():
    await start_ranks(RankPlan(2, 1, Path(sys.argv[1]) / "trainer", 60.0), RealClock())
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_ranks_end_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHANS, str(tmp_path)]
    controller = subprocess.Popen(command, cwd=ROOT, env=environment())
    assert controller.wait(120) == -signal.SIGKILL
    assert gone_within(tmp_path, 10) == []
    sweep()  # as the next one begins
    assert list(FOLDER.glob(f"turnout_{controller.pid}_*")) == []
