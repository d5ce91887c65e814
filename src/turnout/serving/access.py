"""What a client shows an engine and trusts of it: keys and certificates. Never printed, logged or written.

SGLang 0.5.23 asks its --api-key of ordinary calls and its --admin-api-key of those that change it; with both, each
call takes only its own (srt/utils/auth.py). Whoever has one key has it for all calls.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from turnout.core.errors import ConfigError, Fault

ORDINARY = frozenset(
    ("/generate", "/health", "/health_generate", "/server_info", "/get_server_info", "/model_info")
) | {"/get_model_info", "/v1/loads", "/weight_version", "/v1/completions", "/v1/chat/completions"}


@dataclass(frozen=True)
class Access:
    """`api_key` for ordinary calls, `admin_key` for all others; where one is missing the other stands in. `tls`:
    the authorities that https engines are checked against, None: those of the system."""

    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def headers(self, path: str) -> dict[str, str]:
        """For a call to this path."""
        first, other = self.api_key, self.admin_key
        if path not in ORDINARY:
            first, other = other, first
        key = first if first is not None else other
        return {} if key is None else {"Authorization": f"Bearer {key}"}


OPEN = Access()


def authorities(file: Path, flag: str) -> ssl.SSLContext:
    """The certificates of a PEM file, and nobody else's; raises ConfigError that names `flag`."""
    try:
        return ssl.create_default_context(cafile=str(file))
    except (OSError, ssl.SSLError) as fault:
        remedy = "give a PEM file of the authority that signed the engines' certificates"
        raise ConfigError(Fault(flag, str(file), f"can't be read as certificates: {fault}", remedy)) from None
