"""Routes and the form of the next version, by tables."""

from __future__ import annotations

import pytest

from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.weights.anchors import DeltaSize, NextForm, next_form
from turnout.weights.chain import Rates, cheapest
from turnout.weights.checkpoint_io import TensorEntry
from turnout.weights.manifest import ANCHOR, FOLD, VERSION, WeightManifest

RATES = Rates(100.0, 10.0)  # a second for 100 bytes or for 10 changes


def version(counter: int) -> WeightVersion:
    return WeightVersion(0, counter, f"{counter:032x}")


def full(counter: int, nbytes: int = 1000, form: str = VERSION) -> WeightManifest:
    return WeightManifest(version(counter), "full", counter, "run", "w", {"m": nbytes}, {}, {}, form=form)


def delta(counter: int, nbytes: int = 100, changed: int = 0, since: int | None = None) -> WeightManifest:
    base = version(counter - 1 if since is None else since)
    entry = {"a": TensorEntry("F32", (99,), "", "d", "", changed)}
    form = VERSION if since is None else FOLD
    made = (version(counter), "delta", counter, "run", "w", {"d": nbytes}, entry, {})
    return WeightManifest(*made, base=base, encoding="indices", form=form)


def route(versions: list[WeightManifest], target: int, held: int | None) -> list[str]:
    found = cheapest(versions, version(target).root, None if held is None else version(held).root, RATES)
    return [step.directory for step in found.steps]


def test_names_of_folders() -> None:
    assert delta(3).directory == "weight_v000003"
    assert full(3, form=ANCHOR).directory == "anchor_v000003"
    assert delta(1_000_003, since=2).directory == "fold_v000002-v1000003"


def test_a_follower_takes_the_delta_and_a_joiner_the_anchor_of_one_version() -> None:
    store = [full(1), delta(2), full(2, form=ANCHOR), delta(3)]
    assert route(store, 3, held=1) == ["weight_v000002", "weight_v000003"]
    assert route(store, 3, held=None) == ["anchor_v000002", "weight_v000003"]
    assert route(store, 3, held=3) == []


def test_a_chain_that_costs_more_than_an_anchor_is_left() -> None:
    store = [delta(1), delta(2), delta(3), full(3, 299, form=ANCHOR)]
    assert route(store, 3, held=0) == ["anchor_v000003"]
    store[-1] = full(3, 301, form=ANCHOR)
    assert route(store, 3, held=0) == ["weight_v000001", "weight_v000002", "weight_v000003"]


def test_changes_cost_as_well_as_bytes() -> None:
    store = [delta(1, 100, changed=95), full(1, 1000, form=ANCHOR)]
    assert route(store, 1, held=0) == ["anchor_v000001"]
    store[0] = delta(1, 100, changed=85)
    assert route(store, 1, held=0) == ["weight_v000001"]


def test_a_fold_replaces_the_deltas_that_it_was_made_of() -> None:
    store = [delta(1), delta(2), delta(2, 150, since=0), delta(3)]
    assert route(store, 3, held=0) == ["fold_v000000-v000002", "weight_v000003"]
    assert route(store, 3, held=1) == ["weight_v000002", "weight_v000003"]


def test_where_no_way_leads() -> None:
    with pytest.raises(WeightError, match=r"no way leads .* the store holds weight_v000003"):
        cheapest([delta(3)], version(3).root, version(1).root)


@pytest.mark.parametrize(
    ("versions", "parent", "size", "expected"),
    [
        ([], 0, DeltaSize(100, 0), NextForm.DELTA),
        ([], 0, DeltaSize(500, 0), NextForm.DELTA),
        ([], 0, DeltaSize(501, 0), NextForm.FULL),
        ([], 0, DeltaSize(100, 91), NextForm.ANCHORED),
        ([delta(1, 450), delta(2, 450)], 2, DeltaSize(100, 0), NextForm.DELTA),
        ([delta(1, 450), delta(2, 450)], 2, DeltaSize(101, 0), NextForm.ANCHORED),
        ([delta(1, 450), delta(2, 450), full(2, form=ANCHOR)], 2, DeltaSize(101, 0), NextForm.DELTA),
        ([delta(2)], 2, DeltaSize(100, 0), NextForm.FULL),
    ],
)
def test_the_form_of_the_next_version(
    versions: list[WeightManifest], parent: int, size: DeltaSize, expected: NextForm
) -> None:
    """Full is 1000 bytes, so 10 s; the run began with version 0, which is no folder."""
    base = (version(parent).root, version(0).root)
    assert next_form(versions, base, 1000, size, RATES) == expected
