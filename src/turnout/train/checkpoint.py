"""A trainer's state on disk: fp32 masters and AdamW moments in pieces by parameter name, and counters as JSON.

Files: per rank and kind KIND-RANK-of-RANKS.safetensors (master, exp_avg, exp_avg_sq), each with the place of its
pieces in its header (those of a critic under `critic_` before their names), and trainer.json. No pickle. Any number
of ranks reads what any other number wrote. The caller owns the folder: it stages, syncs and renames.

Promises: before anything changes, a state that is not complete, not of one save, or of other parameters is refused
with every difference.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from turnout.core.errors import Fault, ModelError
from turnout.train.pieces import Piece

FORMAT = 2
KINDS = ("master", "exp_avg", "exp_avg_sq")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Counters:
    """Train batches consumed, optimizer steps applied; steps in a row that were not finite, or of few samples; both
    of the critic's optimizer."""

    steps_done: int = 0
    optimizer_steps: int = 0
    nonfinite_in_a_row: int = 0
    low_ess_in_a_row: int = 0
    critic_steps: int = 0
    critic_nonfinite_in_a_row: int = 0


def _file(kind: str, rank: int, ranks: int) -> str:
    return f"{kind}-{rank:05d}-of-{ranks:05d}.safetensors"


def save_state(
    folder: Path, pieces: Iterable[Piece], counters: Counters, rank: int = 0, ranks: int = 1
) -> None:
    """Writes this rank's files; rank 0 writes the counters as well. Raises OSError where that can't be done."""
    kept = [piece for piece in pieces if piece.kept and piece.elements]
    places = {piece.name: [piece.whole, piece.start] for piece in kept}
    header = {"places": json.dumps(places), "steps_done": str(counters.steps_done)}
    for kind in KINDS:
        tensors = {piece.name: piece.tensors[kind] for piece in kept}
        path = folder / _file(kind, rank, ranks)
        try:
            save_file(tensors, path, metadata=header)
        except SafetensorError as fault:  # it tells the system's error in its text only
            number = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(fault) else errno.EIO
            raise OSError(number, str(fault), str(path)) from fault
    if rank == 0:
        text = json.dumps({"format": FORMAT, "ranks": ranks, **asdict(counters)}, indent=1)
        (folder / "trainer.json").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class SavedState:
    """A state that was checked: its counters, and per kind and parameter its pieces with their files."""

    counters: Counters
    pieces: Mapping[str, Mapping[str, Sequence[tuple[Path, Piece]]]]

    def copy_into(self, pieces: Iterable[Piece]) -> None:
        """Fills the tensors of these pieces from whatever files hold parts of them."""
        for piece in pieces:
            for kind, tensor in piece.tensors.items():
                for path, stored in self.pieces[kind][piece.name]:
                    common = piece.overlap(stored)
                    if common is None:
                        continue
                    mine, theirs = common
                    with safe_open(path, framework="pt") as opened:
                        tensor[mine].copy_(opened.get_slice(piece.name)[theirs])


def read_state(folder: Path, expected: Shapes) -> SavedState:
    """The state in `folder`, its tensors not yet read.

    Raises ModelError with every difference where files are missing, broken or of different saves, or the parameters
    differ in name or shape from `expected`, or are not there in full.
    """
    faults: list[Fault] = []
    ranks, counters = _counters(folder / "trainer.json", faults)
    pieces: dict[str, dict[str, list[tuple[Path, Piece]]]] = {}
    for kind in KINDS if ranks else ():
        found: dict[str, list[tuple[Path, Piece]]] = {}
        broken = len(faults)
        for rank in range(ranks):
            path = folder / _file(kind, rank, ranks)
            for piece in _pieces(path, counters.steps_done, faults):
                found.setdefault(piece.name, []).append((path, piece))
        if len(faults) == broken:
            faults += _differences(f"{folder}: {kind}", found, expected)
        pieces[kind] = found
    if faults:
        raise ModelError(faults)
    return SavedState(counters, pieces)


def _pieces(path: Path, steps_done: int, faults: list[Fault]) -> list[Piece]:
    try:
        with safe_open(path, framework="pt") as opened:
            header = opened.metadata()
            if header["steps_done"] != str(steps_done):
                reason = f"is of another save: trainer.json is of {steps_done} steps"
                faults.append(Fault(str(path), f"{header['steps_done']} steps", reason))
            places = json.loads(header["places"])
            return [
                Piece(n, tuple(places[n][0]), tuple(places[n][1]), tuple(opened.get_slice(n).get_shape()))
                for n in opened.keys()  # noqa: SIM118
            ]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError) as fault:
        faults.append(Fault(str(path), "", f"cannot be read ({fault!r})"))
        return []


def _differences(
    where: str, found: Mapping[str, Sequence[tuple[Path, Piece]]], expected: Shapes
) -> list[Fault]:
    faults: list[Fault] = []
    for name in sorted(expected.keys() | found.keys()):
        stored = [piece for _, piece in found.get(name, ())]
        shapes = {piece.whole for piece in stored}
        if shapes != {expected.get(name)}:
            told = " and ".join(map(str, sorted(shapes)))
            reason = f"the model has shape {expected.get(name)}"
            faults.append(Fault(f"{where}: {name}", told, reason, "resume with the same model"))
            continue
        whole = Piece(name, expected[name], (0,) * len(expected[name]), expected[name]).elements
        count = sum(piece.elements for piece in stored)
        if count != whole or not all(piece.fits() for piece in stored) or _overlapping(stored):
            faults.append(
                Fault(f"{where}: {name}", f"{count} elements", f"the pieces do not make up its {whole}")
            )
    return faults


def _overlapping(pieces: Sequence[Piece]) -> bool:
    return any(a.overlap(b) is not None for i, a in enumerate(pieces) for b in pieces[:i])


def _counters(path: Path, faults: list[Fault]) -> tuple[int, Counters]:
    """The number of ranks that saved, 0 where it cannot be known, and the counters."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if row.pop("format") != FORMAT:
            faults.append(Fault(str(path), "", f"is not of format {FORMAT}"))
            return 0, Counters()
        return int(row.pop("ranks")), Counters(**row)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as fault:
        faults.append(Fault(str(path), "", f"cannot be read ({fault!r})"))
        return 0, Counters()
