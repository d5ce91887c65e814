"""One address type for engines and routers: parse what people write, print what URLs need."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from turnout.core.errors import ConfigError, Fault

# An idle connection is used again for so long. SGLang closes its own after 5 s; a request that meets that looks
# like the engine's death.
KEPT_ALIVE_S = 2.0


@dataclass(frozen=True, order=True)
class Address:
    """Scheme, host (IPv6 without brackets) and port of a server."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """No trailing slash, IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

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
        port = parts.port
    except ValueError as fault:
        raise refuse(str(fault)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        raise refuse("scheme, host or port is missing or unknown")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise refuse("an address has no path, query or user")
    return Address(parts.hostname, port, parts.scheme)
