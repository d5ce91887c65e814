"""RTR-02: one address type, IPv6 in brackets."""

from __future__ import annotations

import pytest

from turnout.core.errors import ConfigError
from turnout.serving.address import Address, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("10.0.0.1:80", "10.0.0.1", 80, "http://10.0.0.1:80"),
        ("[::1]:80", "::1", 80, "http://[::1]:80"),
        ("host.x:80", "host.x", 80, "http://host.x:80"),
        ("http://[fe80::1]:80/", "fe80::1", 80, "http://[fe80::1]:80"),
        ("https://host.x:443", "host.x", 443, "https://host.x:443"),
        ("http://10.0.0.1:30000", "10.0.0.1", 30000, "http://10.0.0.1:30000"),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80, "http://[fe80::1%eth0]:80"),
        ("localhost:65535", "localhost", 65535, "http://localhost:65535"),
    ],
)
def test_rtr_02_round_trip(text: str, host: str, port: int, url: str) -> None:
    address = parse_address(text, "--addr")
    assert (address.host, address.port, address.url) == (host, port, url)
    assert parse_address(address.url, "--addr") == address


@pytest.mark.parametrize(
    "text",
    ["::1:80", "2001::1:8080", "http://::1:80", "[::1]", "[::1", "host", "host:", ":80", "host:port", "host:99999",
     "host:-1", "", "ftp://host:80", "http://host", "http://host:80/path", "http://host:80?x=1",
     "http://user@host:80", "http://host:80#f", "[nonsense]:80"],
)  # fmt: skip
def test_rtr_02_what_is_no_address_is_refused_with_advice(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text, "--addr")
    (fault,) = caught.value.faults
    assert (fault.where, fault.value) == ("--addr", text)
    assert "[IPv6]:port" in fault.remedy


def test_a_bare_ipv6_address_is_told_about_brackets() -> None:
    with pytest.raises(ConfigError, match="needs brackets"):
        parse_address("::1:80", "--addr")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False),
     ("::", False), ("fe80::1%eth0", False), ("localhost.example", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert Address(host, 80).loopback == loopback
