"""Rank processes for tests of sharded training, forked for each job from a server that has imported torch: DTensor
keeps device meshes of a process, so that a second process group in it would be taken for the first."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

DEADLINE_S = 300.0  # of a job; a collective call that waits in vain gives up before, and tells where


def _serve(pipe, rank: int, size: int, meeting: Path, job: tuple) -> None:
    function, arguments = job
    try:
        limit = timedelta(seconds=DEADLINE_S / 2)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=limit
        )
        pipe.send((True, function(*arguments)))
        dist.barrier()
    except BaseException:
        pipe.send((False, traceback.format_exc()))


class Ranks:
    """`run` gives the results of one function on a number of ranks."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["turnout.train.sharded", "tests.train_models", "tests.ranks"])

    def run(self, size: int, function, *arguments) -> list:
        """The function's results by rank; it and its arguments are pickled."""
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = [], []
            for rank in range(size):
                mine, theirs = self._context.Pipe()
                job = (theirs, rank, size, Path(folder) / "meeting", (function, arguments))
                processes.append(self._context.Process(target=_serve, args=job, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(mine)
            try:
                return self._answers(pipes)
            finally:
                for process in processes:
                    process.kill()
                    process.join()

    @staticmethod
    def _answers(pipes) -> list:
        waiting, answers = dict(enumerate(pipes)), {}
        while waiting:
            ready = multiprocessing.connection.wait(waiting.values(), DEADLINE_S)
            assert ready, f"ranks {sorted(waiting)} do not answer"
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                fine, answers[rank] = waiting.pop(rank).recv()
                assert fine, f"rank {rank}: {answers[rank]}"
        return [answers[rank] for rank in range(len(pipes))]
