"""What an engine's attestation proves: nothing above the level that was verified.

An embedded engine digests its live tensors (level "memory"). A stock SGLang reports its label and a checksum per
parameter; where all of them are what the trainer's values give, that proves the version (level "checksum").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnout.core.errors import WeightError
from turnout.serving.client import Attestation
from turnout.weights.stock_checksums import disagreement

TRUSTED_LEVELS = ("memory", "checksum")


def check_level(engine: str, found: Attestation) -> None:
    """Raises WeightError where an engine can only name its weights, not prove them."""
    if found.level not in TRUSTED_LEVELS:
        raise WeightError(
            f"engine {engine} can only name its weights (level {found.level!r}), not prove them"
        )


def proved(engine: str, found: Attestation, root: str, expected: Mapping[str, str] | None) -> Attestation:
    """The attestation with what comparing it with the trainer's checksums adds: `root` at level "checksum".

    `expected` are the checksums of the version `root`, None where there are no stock engines. Raises WeightError
    where they differ from what the engine reports, or where nothing is proved."""
    if found.checksums and expected is not None:
        fault = disagreement(expected, found.checksums)
        if fault is not None:
            raise WeightError(f"engine {engine} says {found.label}, but holds other weights: {fault}")
        found = replace(found, root=root, level="checksum")
    check_level(engine, found)
    return found
