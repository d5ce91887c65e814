"""No attestation says more than what was compared."""

from __future__ import annotations

import pytest

from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation
from turnout.transfer.attest import proved

ROOT = "ab" * 16
VERSION = WeightVersion(0, 1, ROOT)
STOCK = Attestation("v1", "", "label", {"a": "1", "b": "2"})


def test_equal_checksums_prove_the_version():
    found = proved("e0", STOCK, VERSION, {"a": "1", "b": "2"})
    assert (found.label, found.root, found.level) == ("v1", ROOT, "checksum")


def test_an_embedded_engine_keeps_what_it_says():
    ours = Attestation("v1", "cd" * 16, "memory")
    assert proved("e0", ours, VERSION, {"a": "1"}) is ours


@pytest.mark.parametrize(
    ("found", "expected", "why"),
    [
        (STOCK, {"a": "1", "b": "3"}, "holds other weights: 1 of its 2 parameters differ: b"),
        (STOCK, {"a": "1"}, "are unknown: b"),
        (STOCK, None, "can only name its weights"),
        (Attestation("v1", "", "label"), {"a": "1"}, "can only name its weights"),
    ],
)
def test_what_is_not_proved_is_refused(found, expected, why):
    with pytest.raises(WeightError, match=why):
        proved("e0", found, VERSION, expected)


def test_a_name_counts_only_where_it_is_trusted_and_right():
    named = Attestation(VERSION.label, "", "label")
    believed = proved("e0", named, VERSION, None, trust_label=True)
    assert (believed.root, believed.level) == (ROOT, "label")
    with pytest.raises(WeightError, match="says that it holds v9"):
        proved("e0", Attestation("v9", "", "label"), VERSION, None, trust_label=True)
    with pytest.raises(WeightError, match="holds other weights"):
        proved("e0", STOCK, VERSION, {"a": "1", "b": "3"}, trust_label=True)
