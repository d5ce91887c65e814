"""The one tree of errors, and the exit status that each branch ends a command with.

TurnoutError (1)
+-- UserError (2)              the user can mend it: every fault names where, what, why, remedy
|   +-- ConfigError            flags and YAML
|   +-- DataError              prompt files
|   +-- ModelError             checkpoints and tokenizers
+-- EngineError (4)            names the engine, the phase of the run and the last version it served
|   +-- EngineDead             connection refused or cut, process gone
|   +-- EngineRefused          a 4xx: the request's fault, never retried
|   |   +-- VersionUnmet       a 409: the engine serves other weights than the request asks for
|   +-- EngineBusy             a 429 or 503: may be retried within the deadline
+-- WeightError (5)            a version that is incomplete, does not match, or was not attested
|   +-- VersionIncomplete      not there, or not whole: may still become visible to this reader
|   +-- WeightsUnknown         an engine holds something else than what was written: only a full update helps
+-- TrainError (6)             non-finite loss, a batch that breaks a promise
|   +-- NothingToTrain         the filter left no batch: the run ends with a checkpoint of what it has
|   +-- TrainerLost            processes of the trainer ended or hang: what was trained since a checkpoint is gone
+-- DeadlineExceeded (7)       names what was waited for
+-- LedgerError (8)            the ledger can't be written: disk full, input/output error
|   +-- OwnerLost              a later incarnation of the run writes it: this process stops
+-- RunStopped (143)           asked to stop: a signal, --max-wall-time
|   +-- RunCut                 had not stopped when its grace was over
+-- IllegalTransition (70)     a machine got an event its state does not allow; nothing changed
+-- InvariantBroken (70)       the program contradicts its own promises
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# What an exit status of `turnout` means: `turnout --help` and docs/guides/failures.md show it.
EXIT_STATUSES: dict[int, str] = {
    0: "done",
    1: "something else was wrong, such as a failed audit or check",
    2: "input that you can mend: each fault with its place, value, reason and remedy",
    3: "not done, and no fault: a stalled run (doctor), not provable here (check), refused by the run (engines)",
    4: "an engine died, hung or could not start",
    5: "a weight version could not be written, does not match, or was not attested",
    6: "a train step could not be done, or nothing was left to train",
    7: "a wait reached its deadline",
    8: "the run's ledger could not be written, or a later process of the run writes it",
    70: "the program contradicts its own promises: please report it",
    130: "interrupted by Ctrl-C",
    143: "stopped by a signal or cut off; `turnout train` with the same words goes on with the run",
}


@dataclass(frozen=True)
class Fault:
    """One thing that a user can mend: where it is, what stands there, why it is wrong, what to do."""

    where: str
    value: str
    reason: str
    remedy: str = ""

    def line(self) -> str:
        shown = f" = {self.value}" if self.value else ""
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.where}{shown}: {self.reason}{remedy}"


class TurnoutError(Exception):
    """Root of all errors raised on purpose."""

    exit_status: ClassVar[int] = 1


def one_line(error: TurnoutError) -> str:
    """The error and its notes, on one line: what it was, and what was waited for then."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


class UserError(TurnoutError):
    """Input that a person can mend. Holds every fault found, not only the first."""

    exit_status = 2
    title: ClassVar[str] = "cannot go on"

    def __init__(self, faults: list[Fault] | tuple[Fault, ...] | Fault) -> None:
        self.faults = (faults,) if isinstance(faults, Fault) else tuple(faults)
        head = f"{self.title} ({len(self.faults)} fault{'s' if len(self.faults) != 1 else ''})"
        super().__init__("\n".join([head, *(f"  {fault.line()}" for fault in self.faults)]))


class ConfigError(UserError):
    title = "configuration refused"


class DataError(UserError):
    title = "data refused"


class ModelError(UserError):
    title = "model refused"


class EngineError(TurnoutError):
    """A fault of one engine, told with the phase it happened in and the last version the engine attested."""

    exit_status = 4

    def __init__(self, engine_id: str, phase: str, last_version: str, reason: str) -> None:
        self.engine_id, self.phase, self.last_version, self.reason = engine_id, phase, last_version, reason
        super().__init__(f"engine {engine_id} failed in phase {phase}, last version {last_version}: {reason}")


class EngineDead(EngineError):
    """The connection was refused or cut, or the process ended."""


class EngineReplaced(EngineDead):
    """Something else answers in the engine's place, or it works for another run: this life of it is over."""


class EngineRefused(EngineError):
    """A 4xx answer: the request's own fault; never retried, never counted against the engine."""


class VersionUnmet(EngineRefused):
    """The engine serves other weights than the request asks for. `last_version` is what it serves, `root` the
    digest of that (empty where the engine names none)."""

    def __init__(self, engine_id: str, last_version: str, root: str, reason: str) -> None:
        self.root = root
        super().__init__(engine_id, "rollout", last_version, reason)


class EngineBusy(EngineError):
    """A 429 or 503 answer: may be retried within the request's deadline."""


class WeightError(TurnoutError):
    """A weight version that is incomplete, contradicts its manifest, or was not attested."""

    exit_status = 5


class VersionIncomplete(WeightError):
    """Something of a version is not there, or not in full. A reader to whom writes show late may wait."""


class WeightsUnknown(WeightError):
    """What an engine holds is not what was written into it: nothing may be served before a full update."""


class GenerateFailed(TurnoutError):
    """A custom generate function raised, did not end, or made nothing."""


class TrainError(TurnoutError):
    """A train step that cannot be done or must not be applied."""

    exit_status = 6


class NothingToTrain(TrainError):
    """No batch can be made of what was sampled: the loop saves a checkpoint, then the run ends with this."""


class TrainerLost(TrainError):
    """A rank of the trainer ended or does not answer; all of them are ended. A checkpoint goes on."""


class DeadlineExceeded(TurnoutError):
    """A wait reached its limit; names what was waited for. Told to three digits: what was left of a longer deadline
    differs from case to case, and equal causes are counted by their text."""

    exit_status = 7

    def __init__(self, what: str, seconds: float) -> None:
        self.what, self.seconds = what, seconds
        super().__init__(f"waited {float(f'{seconds:.3g}'):g} s for {what}")


class LedgerError(TurnoutError):
    """The ledger can't be written. What was asked for was not done, nor said; what was done before is there."""

    exit_status = 8


class OwnerLost(LedgerError):
    """A later incarnation of the run took the ledger: this process must not write, or say, anything more."""


class RunStopped(TurnoutError):
    """The run was asked to stop before its end, and has; a resume goes on with it."""

    exit_status = 143  # as of a process that SIGTERM ended


class RunCut(RunStopped):
    """It was cut off where it was: what it waited for did not end within --grace-s."""


class IllegalTransition(TurnoutError):
    """An event that the machine's table does not allow in its state."""

    exit_status = 70

    def __init__(self, machine: str, state: object, event: object) -> None:
        self.state, self.event = state, event
        super().__init__(f"{machine}: event {event} is not allowed in state {state}")


class InvariantBroken(TurnoutError):
    """A promise of the program itself does not hold."""

    exit_status = 70
