"""What benchmarks.delta found, held against the targets, and as a table."""

from __future__ import annotations

from typing import Any


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The worst of the cases against each target; a target that no case is for is left out."""
    cases = found["cases"]

    def ratio(case: dict[str, Any], name: str, what: str, against: float) -> float:
        return round(case["encodings"][name][what] / against, 3)

    steady = [c for c in cases if c["state"] == "steady"]
    speeds = [(c, name, c["memcpy_gb_per_s"]) for c in cases for name in ("indices", "deltas")]
    both = [(c, what) for c in cases for what in ("encode_gb_per_s", "apply_gb_per_s")]
    slowest = [ratio(c, "packed", "encode_gb_per_s", c["xor_zstd_encode_gb_per_s"]) for c in cases]
    rows: list[tuple[str, float, list[float]]] = [
        (
            "packed, bytes over the bound, at most",
            1.1,
            [ratio(c, "packed", "bytes_over_bound", 1) for c in steady],
        ),
        (
            "indices, deltas: encode over memcpy, at least",
            -0.5,
            [ratio(c, n, "encode_gb_per_s", m) for c, n, m in speeds],
        ),
        (
            "indices, deltas: apply over memcpy, at least",
            -1.0,
            [ratio(c, n, "apply_gb_per_s", m) for c, n, m in speeds],
        ),
        ("packed: encode over xor + zstd, at least", -5.0, slowest),
        (
            "ranked: time over packed's, at most",
            3.0,
            [ratio(c, "packed", w, c["encodings"]["ranked"][w]) for c, w in both],
        ),
        ("pause of an engine, ms, at most", 50.0, [c["pause_ms"] for c in cases if "pause_ms" in c]),
        ("pause with KV kept, ms, at most", 50.0, [c["pause_kept_kv_ms"] for c in cases if "pause_ms" in c]),
    ]
    for rate, limit in ((1e-6, 0.6), (5e-6, 0.7)):
        mine = [ratio(c, "ranked", "bytes_over_bound", 1) for c in steady if c["learning_rate"] == rate]
        rows.append((f"ranked at {rate:g}, bytes over the bound, at most", limit, mine))
    mine = [ratio(c, "ranked", "bytes", c["xor_zstd_bytes"]) for c in steady if c["learning_rate"] == 1e-6]
    rows.append(("ranked at 1e-06, bytes over xor + zstd, at most", 0.33, mine))
    made = []
    for name, limit, values in rows:  # a negative limit is a lower one
        if values:
            worst = max(values) if limit > 0 else min(values)
            met = worst <= limit if limit > 0 else worst >= -limit
            made.append({"target": f"{name} {abs(limit)}", "found": worst, "met": met})
    return made


def table(cases: list[dict[str, Any]]) -> str:
    lines = []
    for case in cases:
        lines.append(
            f"{case['learning_rate']:g} {case['state']}: density {case['density']:.5f}, bound "
            f"{case['entropy_bound_bytes']} (classes {case['class_bound_over_bound']}), memcpy "
            f"{case['memcpy_gb_per_s']} GB/s, xor+zstd {case['xor_zstd_bytes']} at "
            f"{case['xor_zstd_encode_gb_per_s']} GB/s, pause {case.get('pause_ms')} ms"
        )
        for name, row in case["encodings"].items():
            encode, apply = (
                row[f"{what}_gb_per_s"] / case["memcpy_gb_per_s"] for what in ("encode", "apply")
            )
            lines.append(
                f"  {name:12} {row['bytes']:>10} {row['bytes_over_bound']:>7} x bound, encode {encode:.2f} x "
                f"memcpy, apply {apply:.2f} x"
            )
    return "\n".join(lines)
