"""The interface of an address, on the loopback that every machine has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from turnout.placement import interface
from turnout.placement.interface import interface_of

INET6 = """fe80000000000000021a2bfffe3c4d5e 02 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces can be asked for on Linux only")
def test_loopback_is_found_and_what_nobody_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    (tmp_path / "if_inet6").write_text(INET6)
    monkeypatch.setattr(interface, "IF_INET6", tmp_path / "if_inet6")
    assert interface_of("::1") == "lo" and interface_of("fe80::21a:2bff:fe3c:4d5e") == "eth0"
    assert interface_of("2001:db8::1") is None
    monkeypatch.setattr(interface, "IF_INET6", tmp_path / "none")
    assert interface_of("::1") is None
