"""One run at a time has an engine that belongs to nobody."""

from __future__ import annotations

import pytest

from turnout.core.errors import EngineBusy
from turnout.engine.lease import Lease


def test_a_lease_is_renewed_by_its_run_alone_until_it_runs_out_or_is_given_back() -> None:
    lease = Lease("e0")
    assert lease.take("a", 0, 30.0, now=100.0)
    assert not lease.take("a", 0, 30.0, now=120.0)
    with pytest.raises(EngineBusy, match=r"works for run a, incarnation 0, .* for 10 s more"):
        lease.take("b", 0, 30.0, now=140.0)
    assert lease.take("b", 0, 30.0, now=150.0), "the one before said nothing any more"
    with pytest.raises(EngineBusy, match="works for run b"):
        lease.take("a", 0, 30.0, now=151.0)
    assert not lease.take("b", 0, 0.0, now=152.0)
    assert lease.take("a", 0, 30.0, now=152.0)


def test_a_run_that_goes_on_has_it_at_once_and_its_earlier_incarnation_no_more() -> None:
    lease = Lease("e0")
    assert lease.take("a", 0, 30.0, now=0.0)
    assert lease.take("a", 1, 30.0, now=1.0)
    with pytest.raises(EngineBusy, match="incarnation 1"):
        lease.take("a", 0, 30.0, now=2.0)
