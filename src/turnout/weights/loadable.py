"""Whether a version's folder may be given to an engine that loads whatever lies there.

A stock SGLang answers success for a checkpoint with a missing or misspelt tensor or a NaN, and a wrong shape ends
its server (seen with 0.5.23). Promises: what passes here has the names, shapes, dtypes and digests of its manifest
and no value that is NaN or infinite. Run it on the engine's own host: it sees what the engine would see.
"""

from __future__ import annotations

from pathlib import Path

from turnout.core.errors import WeightError
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.manifest import WeightManifest
from turnout.weights.tensors import nonfinite_count
from turnout.weights.verify import verify


def check_loadable(folder: Path) -> WeightManifest:
    """The manifest of a full version that may be loaded; raises WeightError with what is wrong."""
    manifest = verify(folder)
    for tensor in read_checkpoint(folder):
        bad = nonfinite_count(tensor)
        if bad:
            raise WeightError(f"{folder}: {tensor.name} has {bad} values that are NaN or infinite")
    return manifest
