"""Local child processes: started in their own group, watched, and gone when we are done.

Promises: a child's output goes to its own log file; no proxy variable reaches it; `stop` ends the whole
process group, politely first, for certain after the grace time; `ended` tells of a death as soon as the
kernel does. One thread pool a process: the number of threads is set in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from turnout.core.errors import DeadlineExceeded
from turnout.core.ports import Clock

log = logging.getLogger(__name__)
# Threads of a pool spin this often (a millisecond or two) before they sleep. Not at all costs a third of an
# engine's speed, for longer takes the cores from the other half of a run, which begins when this one ends.
POOL_ENVIRONMENT = {"GOMP_SPINCOUNT": "100000", "TOKENIZERS_PARALLELISM": "false"}
# Python's defaults look 10,000 samples in flight through again and again: a fifth of a controller's time and more.
# What a sample leaves is gone by its reference counts; cycles come from errors and ends, which are few.
# 50,000 took 20 us a sample (12,000 samples, 1,000 in flight) and found nothing; this did not run once there.
COLLECTOR = (200_000, 20, 100)
STOPPED = "T"
ODD_STATES = {
    STOPPED: "is stopped (SIGSTOP)",
    "t": "is being traced",
    "Z": "has ended",
    "D": "waits for a disk",
}
FILES_WANTED, FILES_LOW = 65536, 4096  # a sample of an agent has about 3 open
KILLED_S = 10.0  # from SIGKILL to the end of a process
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy")


def child_environment(threads: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child: thread counts set, proxies removed."""
    kept = {name: value for name, value in os.environ.items() if name.lower() not in PROXY_VARIABLES}
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**kept, **counts, "OMP_WAIT_POLICY": "PASSIVE", **POOL_ENVIRONMENT, **(extra or {})}


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Where looking for garbage finds none. While a process imports and loads, all of that stays: the collector
    takes a tenth of the import of torch and a fifth of that of transformers."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def settle_collector() -> None:
    """For the process of a control plane, once all is loaded: the collector leaves alone what there is, and looks
    at the rest rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR)


def raise_file_limit() -> None:
    """Lets this process open as many files and sockets as it may, up to FILES_WANTED; says where they are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft != resource.RLIM_INFINITY and soft < FILES_LOW:
        log.warning(
            "this process may open %d files: raise the hard limit (ulimit -Hn) for many samples", soft
        )


def process_state(pid: int | None) -> str:
    """The letter of a process's state (proc(5)) on this host; empty where it is gone, or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class ChildProcess:
    """One child. Make it with `start`; call `stop` in every case."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, clock: Clock) -> None:
        self.name, self.log, self._process, self._clock = name, log, process, clock

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, clock: Clock
    ) -> ChildProcess:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        return cls(name, process, log, clock)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def state(self) -> str:
        return process_state(self.pid)

    async def ended(self) -> str:
        """Waits for the end of the child and says how it ended, with the last line of its log."""
        code = await self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"process {self.pid} of {self.name} ended: {how}{last_words(self.log)}"

    def kill(self) -> None:
        """SIGKILL to the group, from any thread."""
        if self.alive:
            signal_group(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the group, SIGKILL after `grace_s`; returns when the child is reaped."""
        if self.alive:
            signal_group(self.pid, signal.SIGTERM)
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.within(grace_s, f"{self.name} to stop", self._process.wait())
        signal_group(self.pid, signal.SIGKILL)  # also what the child may have left in its group
        await self._process.wait()


class FoundProcess:
    """A process that another one had started, the leader of its group; used as a ChildProcess."""

    def __init__(self, name: str, pid: int, log: Path, clock: Clock) -> None:
        """Raises ProcessLookupError where there is none."""
        self.name, self.pid, self.log, self._clock = name, pid, log, clock
        self._handle: int | None = os.pidfd_open(pid)

    @property
    def alive(self) -> bool:
        return handle_lives(self._handle)

    @property
    def state(self) -> str:
        return process_state(self.pid)

    async def ended(self) -> str:
        """Waits for its end; how it ended only its parent is told."""
        loop, ends = asyncio.get_running_loop(), asyncio.Event()
        own = None if self._handle is None else os.dup(self._handle)  # several may wait
        try:
            if own is not None:
                loop.add_reader(own, ends.set)
                await ends.wait()
        finally:
            if own is not None:
                loop.remove_reader(own)
                os.close(own)
        return f"process {self.pid} of {self.name} ended{last_words(self.log)}"

    def kill(self) -> None:
        """SIGKILL to the group."""
        if self.alive:
            signal_group(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the group, SIGKILL after `grace_s`; returns when it has ended."""
        if self.alive:
            signal_group(self.pid, signal.SIGTERM)
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.within(grace_s, f"{self.name} to stop", self.ended())
        if self.alive:
            self.kill()
            await self._clock.within(KILLED_S, f"process {self.pid} of {self.name} to end", self.ended())
        self.close()

    def close(self) -> None:
        """Forgets the process."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


OwnProcess = ChildProcess | FoundProcess


def handle_lives(handle: int | None) -> bool:
    """Whether the process of a pidfd has not ended; None: there is none."""
    if handle is None:
        return False
    poll = select.poll()  # takes any descriptor, select none above 1023
    poll.register(handle, select.POLLIN)
    return not poll.poll(0)


def signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def last_words(log: Path) -> str:
    """The last line of a log, for the error that tells of an end; empty where there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f"; its log {log} ends: {lines[-1][:300]}" if lines else ""
