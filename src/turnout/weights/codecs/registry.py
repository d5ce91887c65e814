"""The encodings by name: what a manifest may say, and what --update-weight-encoding offers."""

from __future__ import annotations

from turnout.core.errors import WeightError
from turnout.weights.codecs.codec import Codec
from turnout.weights.codecs.deltas import Deltas, DeltasZstd
from turnout.weights.codecs.indices import Indices
from turnout.weights.codecs.packed import Packed
from turnout.weights.codecs.ranked import Ranked
from turnout.weights.codecs.xor import Xor

CODECS: dict[str, Codec] = {
    "indices": Indices(),
    "deltas": Deltas(),
    "deltas_zstd": DeltasZstd(),
    "packed": Packed(),
    "ranked": Ranked(),
    "xor": Xor(),
}


def codec(name: str) -> Codec:
    """Raises WeightError for an unknown name."""
    if name not in CODECS:
        raise WeightError(f"encoding {name!r} is not known here; known are {', '.join(CODECS)}")
    return CODECS[name]
