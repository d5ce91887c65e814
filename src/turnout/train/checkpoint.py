"""A trainer's state on disk: fp32 masters and AdamW moments by parameter name, and counters as JSON.

Files: master.safetensors, exp_avg.safetensors, exp_avg_sq.safetensors, the same of a critic with `critic_` before,
trainer.json. No pickle. The caller owns the folder: it stages, syncs and renames.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from turnout.core.errors import Fault, ModelError
from turnout.train.parameters import FlatParameters

FORMAT = 1


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


Flats = Mapping[str, FlatParameters]  # by what the names of its files begin with


def _buffers(folder: Path, flats: Flats) -> Iterator[tuple[Path, FlatParameters, Tensor]]:
    for prefix, flat in flats.items():
        for kind, buffer in flat.state.items():
            yield folder / f"{prefix}{kind}.safetensors", flat, buffer


def save_state(folder: Path, flats: Flats, counters: Counters) -> None:
    for path, flat, buffer in _buffers(folder, flats):
        save_file(dict(zip(flat.names, flat.views(buffer))), path)
    text = json.dumps({"format": FORMAT, **asdict(counters)}, indent=1)
    (folder / "trainer.json").write_text(text, encoding="utf-8")


def load_state(folder: Path, flats: Flats) -> Counters:
    """Restores the buffers and returns the counters.

    Raises ModelError, with every difference, before anything is changed, where files are missing or broken or
    the parameters differ in name or shape.
    """
    faults: list[Fault] = []
    for path, flat, _ in _buffers(folder, flats):
        expected = dict(zip(flat.names, flat.shapes))
        try:
            with safe_open(path, framework="pt") as opened:
                found = {n: tuple(opened.get_slice(n).get_shape()) for n in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as fault:
            faults.append(Fault(str(path), "", f"cannot be read ({fault})"))
            continue
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                reason = f"the model has shape {expected.get(name)}"
                faults.append(
                    Fault(f"{path}: {name}", str(found.get(name)), reason, "resume with the same model")
                )
    counters = _counters(folder / "trainer.json", faults)
    if faults:
        raise ModelError(faults)
    for path, flat, buffer in _buffers(folder, flats):
        with safe_open(path, framework="pt") as opened:
            for name, view in zip(flat.names, flat.views(buffer)):
                view.copy_(opened.get_tensor(name))
    for flat in flats.values():
        flat.refresh_compute()
        flat.discard_gradients()
    return counters


def _counters(path: Path, faults: list[Fault]) -> Counters:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if row.pop("format") != FORMAT:
            faults.append(Fault(str(path), "", f"is not of format {FORMAT}"))
        return Counters(**row)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as fault:
        faults.append(Fault(str(path), "", f"cannot be read ({fault!r})"))
        return Counters()
