"""Options of engines that somebody else runs."""

from __future__ import annotations

from typing import ClassVar

from turnout.config.option import PATH, Options, option

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


class ExternalOptions(Options):
    title: ClassVar[str] = "External engines"

    rollout_external_engine_addrs: list[str] = option(
        [],
        "Engines that somebody else runs, as HOST:PORT, [IPv6]:PORT or a URL of these: the run starts none of its "
        "own, asks these what they are, updates their weights, and stops none of them.",
    )
    rollout_external_engine_file: str | None = option(
        None,
        "File with one such address a line, read again as the run goes on: what is added there joins, what is "
        "taken out is asked no more.",
        unset="the list stays as it is",
        pattern=PATH,
    )
    rollout_engine_api_key_env: str | None = option(
        None,
        "Name of the environment variable with the key that external engines ask of ordinary calls.",
        unset="that of --rollout-engine-admin-key-env, else none",
        pattern=VARIABLE,
    )
    rollout_engine_admin_key_env: str | None = option(
        None,
        "Name of the environment variable with the key that they ask of calls that change them.",
        unset="that of --rollout-engine-api-key-env, else none",
        pattern=VARIABLE,
    )
    rollout_engine_ca_file: str | None = option(
        None,
        "PEM file of the authorities that https engines are checked against.",
        unset="those of the system",
        pattern=PATH,
    )
