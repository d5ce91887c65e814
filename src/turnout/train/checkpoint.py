"""A trainer's state on disk: fp32 masters and AdamW moments by parameter name, and counters as JSON.

Files: master.safetensors, exp_avg.safetensors, exp_avg_sq.safetensors, trainer.json. No pickle. The caller
owns the folder: it stages, syncs and renames.
"""

from __future__ import annotations

import json
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
    """Train batches consumed, optimizer steps applied; steps in a row that were not finite, or of few samples."""

    steps_done: int = 0
    optimizer_steps: int = 0
    nonfinite_in_a_row: int = 0
    low_ess_in_a_row: int = 0


def _buffers(flat: FlatParameters) -> dict[str, Tensor]:
    return {"master": flat.master, "exp_avg": flat.exp_avg, "exp_avg_sq": flat.exp_avg_sq}


def save_state(folder: Path, flat: FlatParameters, counters: Counters) -> None:
    for kind, buffer in _buffers(flat).items():
        save_file(dict(zip(flat.names, flat.views(buffer))), folder / f"{kind}.safetensors")
    text = json.dumps({"format": FORMAT, **asdict(counters)}, indent=1)
    (folder / "trainer.json").write_text(text, encoding="utf-8")


def load_state(folder: Path, flat: FlatParameters) -> Counters:
    """Restores the buffers and returns the counters.

    Raises ModelError, with every difference, before anything is changed, where files are missing or broken or
    the parameters differ in name or shape.
    """
    faults: list[Fault] = []
    expected = dict(zip(flat.names, flat.shapes))
    for kind in _buffers(flat):
        path = folder / f"{kind}.safetensors"
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
    for kind, buffer in _buffers(flat).items():
        with safe_open(folder / f"{kind}.safetensors", framework="pt") as opened:
            for name, view in zip(flat.names, flat.views(buffer)):
                view.copy_(opened.get_tensor(name))
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
