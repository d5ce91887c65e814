"""Rank processes for tests of sharded training: started once, forked from a server that has imported torch, and
given one job after another, each in a process group of its own."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

DEADLINE_S = 120.0


def _serve(pipe, rank: int) -> None:
    import torch.distributed as dist

    while (job := pipe.recv()) is not None:
        function, size, meeting, arguments = job
        try:
            limit = timedelta(seconds=DEADLINE_S)
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=limit
            )
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            dist.destroy_process_group()


class Ranks:
    """Up to `size` ranks; `run` gives the results of one function on the first n of them."""

    def __init__(self, size: int = 4) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["turnout.train.sharded", "tests.train_models"])
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = 0
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, size: int, function, *arguments) -> list:
        """The function's results by rank; it and its arguments are pickled."""
        self._jobs += 1
        meeting = Path(self._folder.name) / f"job-{self._jobs}"
        for pipe in self._pipes[:size]:
            pipe.send((function, size, meeting, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:size]):
            assert pipe.poll(DEADLINE_S), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        for rank, (fine, value) in enumerate(answers):
            assert fine, f"rank {rank}: {value}"
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()
