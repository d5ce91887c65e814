"""One address type for engines and routers: parse what people write, print what URLs need."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from turnout.core.errors import ConfigError, Fault


@dataclass(frozen=True, order=True)
class Address:
    """Scheme, host (IPv6 without brackets) and port of a server."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def place(self) -> str:
        """Host and port, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """No trailing slash."""
        return f"{self.scheme}://{self.place}"

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.split("%")[0]).is_loopback
        except ValueError:
            return False


def parse_address(text: str, where: str) -> Address:
    """host:port, [v6]:port or a URL of these without a path; raises ConfigError that says what to write."""

    def refuse(reason: str) -> ConfigError:
        return ConfigError(Fault(where, text, reason, "write host:port, [IPv6]:port or http://host:port"))

    whole = text if "://" in text else f"http://{text}"
    if "://" not in text and text.count(":") > 1 and not text.startswith("["):
        raise refuse("an IPv6 address with a port needs brackets")
    try:
        parts = urlsplit(whole)
        port, host = parts.port, _short(parts.hostname or "")
    except ValueError as fault:
        raise refuse(str(fault)) from None
    if parts.scheme not in ("http", "https") or not host or port is None:
        raise refuse("scheme, host or port is missing or unknown")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise refuse("an address has no path, query or user")
    return Address(host, port, parts.scheme)


def _short(host: str) -> str:
    """An IPv6 address in its one short form, so that equal ones are equal."""
    bare, percent, zone = host.partition("%")
    return f"{ipaddress.ip_address(bare)}{percent}{zone}" if ":" in bare else host
