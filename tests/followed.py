"""A follower process beside a real engine, and a scripted publisher of versions of the tiny model."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.engine_process import EngineProcess
from tests.published import Publisher
from turnout.core.version import WeightVersion
from turnout.train.model_zoo import resolve_checkpoint
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.tensors import HostTensor

DEADLINE_S = 60.0
NO_TORCH = Path(__file__).parent / "process" / "no_torch"


def tiny() -> tuple[Path, list[HostTensor]]:
    folder = resolve_checkpoint("tiny:llama")
    return folder, list(read_checkpoint(folder))


def stepped(tensors: Sequence[HostTensor], seed: int, share: float = 0.02) -> list[HostTensor]:
    """What a train step makes of weights: some of them move by a bit of their last place, or a few."""
    rng = np.random.default_rng(seed)
    after = []
    for tensor in tensors:
        by = np.where(rng.random(tensor.bits.size) < share, rng.integers(1, 5, tensor.bits.size), 0)
        bits = tensor.bits ^ by.astype(tensor.bits.dtype)
        after.append(HostTensor(tensor.name, tensor.dtype, tensor.shape, bits))
    return after


def tiny_publisher(root: Path) -> Publisher:
    folder, tensors = tiny()
    return Publisher(root, tensors, assets=folder)


class Lines:
    """A process whose lines of stdout come by `line`."""

    def __init__(self, process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> None:
        self.process, self._deadline_s = process, deadline_s
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()

    def line(self, text: str) -> str:
        """The next line with this text."""
        end = time.monotonic() + self._deadline_s
        while True:
            try:
                found = self._queue.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                tail = self.lines[-9:]
                raise AssertionError(f"no {text!r} within {self._deadline_s} s: {tail}") from None
            assert found is not None, f"ended before {text!r}: {self.lines[-5:]} {self._errors()}"
            if text in found:
                return found

    def drain(self) -> None:
        """Forgets the lines that nobody waited for."""
        while not self._queue.empty():
            self._queue.get()

    def ended(self) -> tuple[int, list[str], str]:
        """Exit status, lines, stderr."""
        status = self.process.wait(self._deadline_s)
        while self._queue.get(timeout=self._deadline_s) is not None:
            continue
        return status, self.lines, self._errors()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(self._deadline_s)

    def _errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._queue.put(self.lines[-1])
        self._queue.put(None)


class FollowerProcess(Lines):
    """One follower that torch and transformers are hidden from."""

    def __init__(
        self,
        store: Path | str,
        host: Path,
        *words: str,
        seed: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        module = (
            ["turnout.cli.main", "weights", "follow"] if seed is None else ["tests.follower_child", str(seed)]
        )
        path = os.pathsep.join([str(NO_TORCH), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-m", *module, "--store", str(store), "--local-checkpoint", str(host),
             "--poll-interval", "0.1", "--follower-id", host.name, *words],
            cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )  # fmt: skip
        super().__init__(process, deadline_s)


def serves(engine: EngineProcess, version: WeightVersion) -> bool:
    """Whether an engine attests just this version from its live tensors."""
    status, row = engine.call("/weight_version")
    assert status == 200, row
    return (row["version"], row["root"], row["level"]) == (version.label, version.root, "memory")


def bytes_of(store: Path, *folders: str) -> int:
    """Bytes of the files that a follower fetches of these folders."""
    skipped = ("manifest.json", "DONE")
    return sum(p.stat().st_size for f in folders for p in (store / f).iterdir() if p.name not in skipped)


def bytes_read(line: str) -> int:
    return int(line.split(" read ")[1].split(maxsplit=1)[0])
