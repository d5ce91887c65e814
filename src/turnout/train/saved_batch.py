"""A train batch as one file: its samples as turnout.train.batch_bytes has them, and JSON in the header. No torch.

`__metadata__` holds `turnout`: {format, step, version, about}, where `about` is what the writer tells of the batch.
Promises: what is read is equal to what was written; a file that is torn, or of another kind, is refused by name.
The caller writes the bytes atomically.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from turnout.core.errors import DataError, Fault
from turnout.core.types import TrainBatch
from turnout.train.batch_bytes import bytes_of, samples_of

FORMAT = 1
KEY = "turnout"


@dataclass(frozen=True)
class SavedBatch:
    """`about` is what the writer told of the batch: JSON values by name."""

    batch: TrainBatch
    about: dict[str, Any]


def batch_bytes(batch: TrainBatch, about: dict[str, Any]) -> bytes:
    """The whole file."""
    head = {"format": FORMAT, "step": batch.step, "version": batch.version, "about": about}
    return bytes_of(batch.samples, {KEY: json.dumps(head)})


def read_batch(path: Path) -> SavedBatch:
    """Raises DataError where the file can't be read, or is no saved batch."""
    try:
        with safe_open(path, framework="np") as opened:
            head = json.loads((opened.metadata() or {})[KEY])
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']}")
        samples = samples_of(path.read_bytes())
        return SavedBatch(TrainBatch(head["step"], head["version"], samples), head["about"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as fault:
        told = "it is no file of a saved batch" if isinstance(fault, KeyError) else f"{fault}"
        raise DataError(Fault(str(path), "", f"cannot be read: {told}")) from None
