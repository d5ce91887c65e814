"""Deltas between real versions of SmolLM2-135M: size, speed, and the pause of an engine that applies one.

    python -m benchmarks.delta --json FILE [--quick] [--rounds N] [--no-pause]

Versions: benchmarks.versions. `encode` finds what changed between two versions in memory and encodes it, all
tensors; `apply` decodes and overwrites a copy of the base; `memcpy` copies all tensors into memory that is there
already, on the same threads; `xor_zstd` is new xor old, then zstd level 1, in blocks on all threads. GB/s are bytes
of the full tensors per second. In turns, medians. Bounds: benchmarks.entropy. `pause_ms`: benchmarks.delta_pause.
`--quick`: two learning rates, fewer rounds; versions that are not in the cache yet are made first, which takes
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zstandard

from benchmarks import machine
from benchmarks.delta_pause import Pauses, larger
from benchmarks.delta_targets import table, targets
from benchmarks.entropy import bounds
from benchmarks.versions import CACHE, RATES, STATES, WARM_STEPS, Pair, pair
from turnout.weights.changes import Bits, Change, compare, overwrite_all
from turnout.weights.codecs.codec import Encoded, Head
from turnout.weights.codecs.registry import CODECS, codec

BLOCK = 1 << 21  # elements that a thread copies, or compresses, at a time
CHECK = CACHE / "steady_check.json"  # what `benchmarks.versions --check` found


@dataclass
class Case:
    """One pair of versions, measured."""

    pair: Pair
    threads: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = [tensor.bits for tensor in self.pair.base]
        self.full_bytes = sum(bits.nbytes for bits in self.base)
        self._target = [bits.copy() for bits in self.base]
        cuts = [(at, i) for at, bits in enumerate(self.base) for i in range(0, bits.size, BLOCK)]
        self._blocks = [(at, slice(i, i + BLOCK)) for at, i in cuts]
        self._local, self._checked = threading.local(), set[str]()

    def round(self, pool: ThreadPoolExecutor) -> None:
        """Everything once."""
        self._timed("memcpy", self._copy, pool)
        for name in CODECS:
            changes, encoded = self._timed(f"encode {name}", self._encode, name)
            self._copy(pool)  # the target is the base again
            self._timed(f"apply {name}", self._apply, name, changes, encoded)
            self.sizes[name] = encoded.nbytes
            if name not in self._checked:
                self._check(name)
        self.sizes["xor_zstd"] = self._timed("xor_zstd", lambda: sum(pool.map(self._xor_zstd, self._blocks)))

    def _check(self, name: str) -> None:
        self._checked.add(name)
        for bits, tensor in zip(self._target, self.pair.new):
            if not np.array_equal(bits, tensor.bits):
                raise RuntimeError(f"{name}: {tensor.name} is not the new version")

    def _timed(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        made = work(*arguments)
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return made

    def _copy(self, pool: ThreadPoolExecutor) -> None:
        list(
            pool.map(lambda block: _copy(self._target[block[0]], self.base[block[0]], block[1]), self._blocks)
        )

    def _encode(self, name: str) -> tuple[list[Change], Encoded]:
        found = [change for change, _ in compare(list(zip(self.base, self.pair.new)))]
        return found, codec(name).encode([(c, b) for c, b in zip(found, self.base) if c.count])

    def _apply(self, name: str, found: list[Change], encoded: Encoded) -> None:
        """`found` is what the manifest says; positions and bits come from the encoded bytes."""
        decode = codec(name).decoder(encoded.shared)
        changed = [(c, target) for c, target in zip(found, self._target) if c.count]
        decoded = []
        for (change, target), part in zip(changed, encoded.parts, strict=True):
            head = Head(change.name, change.dtype, change.shape, change.count)
            decoded.append((target, decode(part, head, target if codec(name).needs_base else None)))
        overwrite_all(decoded)

    def _xor_zstd(self, block: tuple[int, slice]) -> int:
        at, cut = block
        made = getattr(self._local, "made", None)
        if made is None:
            made = self._local.made = zstandard.ZstdCompressor(level=1), np.empty(BLOCK, np.uint16)
        compressor, space = made
        old, new = self.base[at][cut], self.pair.new[at].bits[cut]
        return len(compressor.compress(np.bitwise_xor(old, new, out=space[: old.size]).data))

    def result(self) -> dict[str, Any]:
        changes = compare(list(zip(self.base, self.pair.new)))
        items = [(change, base) for (change, _), base in zip(changes, self.base)]
        bound, classed = bounds(items)
        rate = {name: self.full_bytes / median(s) / 1e9 for name, s in self.seconds.items()}
        encodings = {
            name: {
                "bytes": self.sizes[name],
                "bytes_over_bound": round(self.sizes[name] / bound, 4),
                "encode_gb_per_s": round(rate[f"encode {name}"], 3),
                "apply_gb_per_s": round(rate[f"apply {name}"], 3),
                "times_smaller_than_full": round(self.full_bytes / self.sizes[name], 1),
            }
            for name in CODECS
        }
        changed = sum(change.count for change, _ in items)
        return {
            "learning_rate": self.pair.learning_rate,
            "state": self.pair.state,
            "density": changed / sum(bits.size for bits in self.base),
            "changed": changed,
            "entropy_bound_bytes": bound,
            "class_bound_bytes": classed,
            "class_bound_over_bound": round(classed / bound, 4),
            "full_bytes": self.full_bytes,
            "encodings": encodings,
            "memcpy_gb_per_s": round(rate["memcpy"], 3),
            "xor_zstd_bytes": self.sizes["xor_zstd"],
            "xor_zstd_encode_gb_per_s": round(rate["xor_zstd"], 3),
            "seconds": {name: [round(s, 5) for s in taken] for name, taken in self.seconds.items()},
        }


def _copy(target: Bits, source: Bits, cut: slice) -> None:
    np.copyto(target[cut], source[cut])


def measure(one: Pair, threads: int, rounds: int) -> dict[str, Any]:
    case = Case(one, threads)
    with ThreadPoolExecutor(threads) as pool:
        case.round(pool)  # a warm-up
        case.seconds.clear()
        for _ in range(rounds):
            case.round(pool)
    return case.result()


def add_pauses(cases: list[dict[str, Any]], threads: int, repeats: int) -> dict[str, Any]:
    """Puts the pauses into the cases; returns those of a model four times as large with as many changes as the last
    case has."""
    with Pauses(threads, repeats) as pauses:
        for case in cases:
            case.update(pauses.of(pair(case["learning_rate"], case["state"])))
            print(f"{case['learning_rate']:g} {case['state']}: pause {case['pause_ms']} ms", file=sys.stderr)
    folder, one = larger(cases[-1]["changed"])
    with Pauses(threads, repeats, folder) as pauses:
        return {
            "weights": sum(t.bits.size for t in one.base),
            "changed": cases[-1]["changed"],
            **pauses.of(one),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--no-pause", action="store_true")
    asked = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS", machine.cpus()))
    rounds = asked.rounds if asked.rounds is not None else 3 if asked.quick else 7
    began = time.perf_counter()
    found: dict[str, Any] = {"machine": machine.describe(), "threads": threads, "rounds": rounds}
    found["steady"] = (
        f"masters drawn uniformly from the intervals that round to their bf16 values, then {WARM_STEPS} real steps "
        "at 5e-6, then two at each learning rate; the second one is measured"
    )
    found["steady_check"] = json.loads(CHECK.read_text()) if CHECK.exists() else None
    wanted = [(rate, state) for rate in (RATES[:2] if asked.quick else RATES) for state in STATES]
    found["cases"] = []
    for rate, state in wanted:
        found["cases"].append(measure(pair(rate, state), threads, rounds))
        print(table(found["cases"][-1:]), file=sys.stderr)
    if not asked.no_pause:
        found["large"] = add_pauses(found["cases"], threads, 1 if asked.quick else 3)
    found["targets"] = targets(found)
    found["seconds"] = round(time.perf_counter() - began, 1)
    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(
        *(f"{'met ' if row['met'] else 'NOT '} {row['target']}: {row['found']}" for row in found["targets"]),
        sep="\n",
    )


if __name__ == "__main__":
    main()
