"""A rank other than 0 of a sharded engine: `python -m turnout.engine.parallel_worker`, started by rank 0 only.

Consumes the messages of two channels (turnout/engine/parallel_channel.py): steps, in this process's main thread,
and weights, in a second one. Promises: ends with rank 0, however that ends; any fault ends this process, and rank 0
with it; VICTIM_STATUS says that another rank was waited for in vain.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnout.engine.parallel_group import Group
from turnout.engine.parallel_model import ParallelForward, load_shard
from turnout.engine.parallel_plan import VICTIM_STATUS, RankReport
from turnout.engine.parallel_storage import LIVE, ShardStorage
from turnout.engine.parallel_update import Answer, SliceReceiver
from turnout.engine.patches import Placed
from turnout.engine.runner import Runner
from turnout.engine.sampler import Draw, Sampled
from turnout.engine.settings import EngineSettings
from turnout.placement.footprint import give_back
from turnout.placement.parent import die_with
from turnout.weights.digest import Sums

log = logging.getLogger(__name__)
FAULT_STATUS = 70


class Follower(Runner):
    """Computes the same steps as rank 0 and draws nothing: only rank 0 has whole logits."""

    def _sample(self, logits: Tensor, draws: Sequence[Draw]) -> Sampled:  # noqa: ARG002
        return Sampled([], [])

    def _score(self, logits: Tensor, targets: NDArray[np.int64]) -> list[float]:  # noqa: ARG002
        return []


class Worker:
    """One rank's model, cache and staged buffers."""

    def __init__(self, settings: EngineSettings, rank: int, group: Group) -> None:
        shard = load_shard(settings, rank, group)
        forward = ParallelForward(shard.module, settings.row_block, group)
        self.storage = ShardStorage(shard)
        self.runner = Follower(shard.model, settings, (forward, self.storage.local))
        self._report = RankReport(rank, os.getpid(), self.storage.nbytes, self.runner.cache.nbytes)
        self._group, self._settings = group, settings
        self._staged: dict[int, Tensor] = {}
        self._receiver = SliceReceiver(self.storage)
        self._patches: dict[int, list[Placed | None]] = {}

    def steps(self, channel: Connection) -> None:
        """Serves steps until rank 0 goes away (EOFError)."""
        while True:
            verb, *arguments = channel.recv()
            if verb == "run":
                self.runner.run(arguments[0])
            elif verb == "swap":
                self.storage.swap({buffer: self._staged[key] for buffer, key in arguments[0].items()})
                channel.send(None)
            elif verb == "exchange":
                channel.send(self._exchange(*arguments))
            elif verb == "release_weights":
                channel.send(_given_back(self.storage.local.release))
            elif verb == "release_cache":
                channel.send(_given_back(self.runner.release_cache))
            elif verb == "restore_cache":
                channel.send(self.runner.restore_cache())
            elif verb == "report":
                channel.send(self._report)
                self._group.limit(self._settings.rank_timeout_s)
            else:
                raise ValueError(f"unknown message {verb!r} on the channel of steps")

    def weights(self, channel: Connection) -> None:
        """Serves what fills and reads buffers until rank 0 goes away (EOFError)."""
        while True:
            verb, *arguments = channel.recv()
            if verb == "fresh":
                key, buffer = arguments
                self._staged[key] = self.storage.fresh(buffer)
            elif verb == "write":
                view = self.storage.view(*self._tensor(*arguments))
                channel.recv_bytes_into(view.view(np.uint8).data)
            elif verb == "group":
                channel.send(self._by_group(*arguments))
            elif verb == "patches":
                self._patches[arguments[0]] = arguments[1]
            elif verb == "exchange":
                channel.send(self._exchange(*arguments))
            elif verb == "sums":
                *where, dtype = arguments
                channel.send(self.storage.sums(*self._tensor(*where), dtype))
            elif verb == "read":
                channel.send_bytes(self.storage.view(*self._tensor(*arguments)).view(np.uint8).data)
            elif verb == "staged":
                channel.send(len(self._staged) + len(self._patches))
            elif verb == "forget":
                for key in arguments[0]:
                    self._staged.pop(key, None)
                    self._patches.pop(key, None)
            else:
                raise ValueError(f"unknown message {verb!r} on the channel of weights")

    def _by_group(self, what: str, *arguments: Any) -> Answer:
        receiver = self._receiver
        if what == "join":
            return receiver.answer(lambda: receiver.join(*arguments))
        if what == "leave":
            return receiver.answer(lambda: receiver.leave(*arguments))
        bucket, keys = arguments
        held = {name: self._staged[key] for name, key in keys.items()}
        return receiver.answer(lambda: receiver.receive(bucket, held))

    def _exchange(self, key: int, buffers: dict[str, int], write: bool) -> list[Sums]:
        held = {buffer: self._staged[staged] for buffer, staged in buffers.items()}
        return self.storage.exchange(self._patches[key], held, write)

    def _tensor(self, key: int, name: str) -> tuple[Tensor, str]:
        if key != LIVE:
            return self._staged[key], name
        return self.storage.live(self.storage.specs[name].buffer), name


def _given_back(release: Callable[[], int]) -> int:
    freed = release()
    give_back()
    return freed


def guarded(work: Callable[[Connection], None], channel: Connection) -> NoReturn:
    """Runs one channel's service; whatever ends it ends this process."""
    try:
        work(channel)
        status = 0
    except (EOFError, ConnectionError):  # rank 0 is gone
        status = 0
    except RuntimeError as fault:
        log.error("a step with the other ranks failed: %s", fault)
        status = VICTIM_STATUS
    except BaseException as fault:  # whatever it is, a rank must not go on without one of its threads
        log.critical("this rank ends: %r", fault, exc_info=fault)
        status = FAULT_STATUS
    logging.shutdown()
    os._exit(status)


def main(argv: list[str] | None = None) -> NoReturn:
    build = argparse.ArgumentParser(prog="turnout-engine-rank")
    build.add_argument("--engine-id", required=True)
    build.add_argument("--rank", type=int, required=True)
    build.add_argument("--parent-pid", type=int, required=True)
    build.add_argument("--channels", type=int, nargs=2, required=True, help="file descriptors")
    asked = build.parse_args(argv)
    die_with(asked.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    name = f"{asked.engine_id} rank {asked.rank}"
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s {name}: %(message)s")
    steps, weights = (Connection(number) for number in asked.channels)

    def serve(channel: Connection) -> None:
        _, settings, store, deadline_s = channel.recv()
        torch.set_num_threads(settings.threads)
        worker = Worker(settings, asked.rank, Group(store, asked.rank, settings.tp_size, deadline_s))
        threading.Thread(target=guarded, args=(worker.weights, weights), name="turnout-weights").start()
        worker.steps(channel)

    guarded(serve, steps)


if __name__ == "__main__":
    main()
