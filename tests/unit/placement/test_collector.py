"""The garbage collector is off while a process loads, and on afterwards whatever happens."""

from __future__ import annotations

import gc

import pytest

from turnout.placement.processes import collector_off


def test_it_is_on_again_after_a_failure():
    with pytest.raises(ValueError, match="refused"), collector_off():
        assert not gc.isenabled()
        raise ValueError("refused")
    assert gc.isenabled()
