"""The sender's base: where it comes from, what a delta against it holds, when it moves, and what it costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.weight_files import finite, finite_model, touched
from turnout.core.errors import InvariantBroken, WeightError
from turnout.transfer.snapshot import Snapshot
from turnout.weights.changes import overwrite
from turnout.weights.delta_io import write_delta
from turnout.weights.digest import root_of, tensor_digest
from turnout.weights.tensors import UNSIGNED, HostTensor, converted


def applied(snapshot: Snapshot, base: list[HostTensor], export: list[HostTensor]) -> dict[str, bytes]:
    """What an engine that holds `base` has after the delta."""
    bits = {t.name: t.bits.copy() for t in base}
    for delta in snapshot.changes(export):
        overwrite(bits[delta.change.name], delta.change)
    return {name: value.tobytes() for name, value in bits.items()}


def test_a_delta_makes_the_export_of_the_base() -> None:
    base, new = finite_model(0), finite_model(1)
    snapshot = Snapshot(base, base)
    assert snapshot.root == root_of(base)
    assert applied(snapshot, base, new) == {t.name: t.bits.tobytes() for t in new}
    deltas = {d.change.name: d for d in snapshot.changes(new)}
    for old, tensor in zip(base, new):
        delta = deltas[tensor.name]
        assert (delta.before, delta.after) == (tensor_digest(old), tensor_digest(tensor))
        assert (delta.change.dtype, delta.change.shape) == (tensor.dtype, tensor.shape)
    assert snapshot.survey(new).root == root_of(new)
    assert snapshot.root == root_of(base)  # looking moves nothing


def test_the_survey_counts_what_differs() -> None:
    base = finite_model()
    found = Snapshot(base, base).survey(touched(base, "router", 5, 0))
    assert (found.changed, found.changed_bytes, found.elements) == (1, 4, 553)
    assert found.nbytes == sum(t.nbytes for t in base)
    assert Snapshot(base, base).survey(base).density == 0.0


def test_zeros_of_either_sign_differ() -> None:
    base = touched(finite_model(), "embed", 3, 0)
    deltas = [d for d in Snapshot(base, base).changes(touched(base, "embed", 3, 0x8000)) if d.change.count]
    assert [(d.change.name, list(d.change.positions), list(d.change.bits)) for d in deltas] == [
        ("embed", [3], [0x8000])
    ]


def test_wgt_01_what_was_not_committed_is_sent_again() -> None:
    base, first, second = finite_model(0), finite_model(1), finite_model(2)
    snapshot = Snapshot(base, base)
    lost = snapshot.survey(touched(base, "embed", 7, 1))  # published, and then some engine failed
    assert lost.changed == 1
    again = touched(touched(base, "embed", 7, 1), "embed", 9, 2)
    (delta,) = [d for d in snapshot.changes(again) if d.change.count]
    assert list(delta.change.positions) == [7, 9]
    snapshot.commit(first, snapshot.survey(first).lines)
    assert snapshot.root == root_of(first)
    assert applied(snapshot, first, second) == {t.name: t.bits.tobytes() for t in second}


def test_the_base_does_not_share_memory_with_the_trainer() -> None:
    base = finite_model()
    snapshot = Snapshot(base, base)
    base[0].bits[0] ^= 1
    assert snapshot.survey(base).changed == 1
    new = finite_model(1)
    snapshot.commit(new, snapshot.survey(new).lines)
    new[0].bits[0] ^= 1
    assert snapshot.survey(new).changed == 1


@pytest.mark.parametrize(("dtype", "bits"), [("BF16", 0x7FC1), ("BF16", 0xFF80), ("F32", 0x7F800000)])
def test_wgt_02_no_nan_or_infinity_is_published(dtype: str, bits: int) -> None:
    base = finite_model()
    snapshot = Snapshot(base, base)
    name = "embed" if dtype == "BF16" else "router"
    with pytest.raises(WeightError, match=f"{name} has 1 values that are NaN or infinite"):
        snapshot.survey(touched(base, name, 2, bits))
    assert snapshot.root == root_of(base)


def test_wgt_13_a_float32_router_stays_float32() -> None:
    """A value that bf16 cannot hold arrives whole."""
    base = finite_model()
    new = touched(base, "router", 1, 0x3F800001)
    (delta,) = [d for d in Snapshot(base, base).changes(new) if d.change.count]
    assert (delta.change.dtype, list(delta.change.bits)) == ("F32", [0x3F800001])


def test_the_base_is_what_the_engines_loaded_not_what_the_trainer_holds() -> None:
    base = finite_model()
    with pytest.raises(WeightError, match="embed has other values in the trainer"):
        Snapshot(base, touched(base, "embed", 0, 1))
    padded = [t for t in base if t.name != "embed"] + [finite("embed", "BF16", (36, 16), 0)]
    with pytest.raises(WeightError, match=r"embed has \[36, 16\] in the trainer, the shape \[32, 16\]"):
        Snapshot(base, padded)
    with pytest.raises(WeightError, match=r"norm .* nothing in the checkpoint"):
        Snapshot([t for t in base if t.name != "norm"], base)
    extra = [*base, finite("rotary_emb.inv_freq", "F32", (4,), 0)]
    assert Snapshot(extra, base).root == root_of(base)


@pytest.mark.parametrize("stored", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("compute", ["BF16", "F32"])
def test_engines_attest_the_stored_dtype_where_it_holds_the_values(stored: str, compute: str) -> None:
    """What LiveWeights says after loading the same checkpoint (turnout.engine.weights)."""
    source = finite("w", "BF16", (4, 4), 3)
    if stored == "F32":
        source = finite("w", "F32", (4, 4), 3)
    if stored == "F16":
        half = np.random.default_rng(3).standard_normal(16).astype(np.float16).view(UNSIGNED[2])
        source = HostTensor("w", "F16", (4, 4), half)
    export = [converted(source, compute)]
    snapshot = Snapshot([source], export)
    attested = "BF16" if compute == "BF16" else stored
    assert [line[0] for line in snapshot.lines.values()] == [attested]
    assert snapshot.comparable == (attested == compute)


def test_a_base_in_another_dtype_is_replaced_by_the_first_version() -> None:
    source = finite_model(0)
    wide = [converted(t, "F32") for t in source]
    snapshot = Snapshot(source, wide)
    assert snapshot.root == root_of(source) and not snapshot.comparable
    new = [converted(t, "F32") for t in finite_model(1)]
    found = snapshot.survey(new)
    assert (found.root, found.density) == (root_of(new), 1.0)
    with pytest.raises(WeightError, match="router has 1 values that are NaN"):
        snapshot.survey(touched(new, "router", 0, 0x7FC00000))
    snapshot.commit(new, found.lines)
    assert snapshot.comparable and snapshot.root == root_of(new)
    assert snapshot.survey(touched(new, "norm", 0, 0)).changed == 1


def test_an_export_of_other_tensors_is_refused() -> None:
    base = finite_model()
    snapshot = Snapshot(base, base)
    with pytest.raises(WeightError, match="not exported: norm"):
        snapshot.survey([t for t in base if t.name != "norm"])
    with pytest.raises(WeightError, match="norm is exported twice"):
        snapshot.survey([*base, base[2]])
    with pytest.raises(WeightError, match="other is exported twice, or no engine has it"):
        snapshot.survey([*base, finite("other", "BF16", (2,), 0)])
    with pytest.raises(WeightError, match=r"embed is exported as F32 \[32, 16\], engines hold BF16"):
        snapshot.survey([converted(t, "F32") for t in base])


def test_a_commit_of_something_else_than_was_published_ends_the_run() -> None:
    base, new = finite_model(0), finite_model(1)
    snapshot = Snapshot(base, base)
    found = snapshot.survey(new)
    with pytest.raises(InvariantBroken, match="router is not what was published"):
        snapshot.commit(touched(new, "router", 3, 0), found.lines)


def test_an_audit_finds_one_wrong_element_in_the_base() -> None:
    base = finite_model()
    snapshot = Snapshot(base, base)
    snapshot.audit()
    next(d for d in snapshot.changes(base) if d.change.name == "router").base[6] ^= 1
    with pytest.raises(InvariantBroken, match="not what its digests say: router"):
        snapshot.audit()


BUCKET = 1 << 20


def large(seed: int, share: float) -> list[HostTensor]:
    """Twelve tensors of 1 MiB; `share` of their elements are not those of seed 0."""
    made = []
    for number in range(12):
        bits = np.random.default_rng(number).integers(0, 0x3F80, BUCKET // 2, np.uint16)
        if seed:
            chosen = np.random.default_rng([number, seed]).random(bits.size, np.float32) < share
            bits[chosen] ^= np.uint16(1)
        made.append(HostTensor(f"w{number}", "BF16", (512, 1024), bits))
    return made


def exported(model: list[HostTensor]) -> Iterator[HostTensor]:
    """One copy at a time, as the trainer exports."""
    for tensor in model:
        yield HostTensor(tensor.name, tensor.dtype, tensor.shape, tensor.bits.copy())


def test_mem_04_a_publish_holds_at_most_two_buckets_beside_model_and_base(tmp_path: Path) -> None:
    snapshot, model = Snapshot(large(0, 0), large(0, 0)), large(1, 0.05)
    lines = snapshot.survey(model).lines
    work: list[Callable[[], object]] = [
        lambda: snapshot.survey(exported(model)),
        lambda: write_delta(tmp_path, snapshot.changes(exported(model)), "indices", BUCKET),
        lambda: snapshot.commit(exported(model), lines),
    ]
    peaks = []
    tracemalloc.start()
    try:
        for each in work:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            each()
            peaks.append((tracemalloc.get_traced_memory()[1] - before) / BUCKET)
    finally:
        tracemalloc.stop()
    assert max(peaks) <= 2.0, peaks
