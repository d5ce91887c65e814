"""What an engine's attestation proves: nothing above the level that was verified.

An embedded engine digests its live tensors (level "memory"). A stock SGLang reports its label and a checksum per
parameter; where all of them are what the trainer's values give, that proves the version (level "checksum").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation
from turnout.weights.stock_checksums import StockEngine, disagreement

Expected = Mapping[StockEngine, Mapping[str, str]]  # what each kind of stock engine must report of a version
TRUSTED_LEVELS = ("memory", "checksum")


def proved(
    engine: str,
    found: Attestation,
    version: WeightVersion,
    expected: Mapping[str, str] | None,
    trust_label: bool = False,
) -> Attestation:
    """The attestation with what is known beyond it: the root of `version`, at level "checksum" where the checksums
    are those `expected` of that version (None: there are no stock engines), at level "label" where the engine names
    it and `trust_label` takes its word for it.

    Raises WeightError where checksums differ, or where nothing is proved."""
    if found.checksums and expected is not None:
        fault = disagreement(expected, found.checksums)
        if fault is not None:
            raise WeightError(f"engine {engine} says {found.label}, but holds other weights: {fault}")
        return replace(found, root=version.root, level="checksum")
    if found.level in TRUSTED_LEVELS:
        return found
    if not trust_label:
        raise WeightError(
            f"engine {engine} can only name its weights (level {found.level!r}), not prove them; "
            "--trust-label takes its word"
        )
    if found.label != version.label:
        raise WeightError(f"engine {engine} says that it holds {found.label}, not {version.label}")
    return replace(found, root=version.root)
