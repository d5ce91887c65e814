"""What must hold between the options of external engines and the others. Rules as in turnout.config.checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from turnout.config.run_config import RunConfig, specs
from turnout.core.address import Address, parse_address
from turnout.core.errors import ConfigError, Fault

ADDRESSES = "--rollout-external-engine-addrs"


def addresses_are_good(c: RunConfig) -> Iterator[Fault]:
    seen: dict[tuple[str, int], str] = {}
    for text in c.rollout_external_engine_addrs:
        try:
            address = parse_address(text, ADDRESSES)
        except ConfigError as wrong:
            yield from wrong.faults
            continue
        before = seen.setdefault((address.host, address.port), text)
        if before is not text:
            yield Fault(ADDRESSES, text, f"names the engine of {before} again", "name each engine once")


def only_with_external(c: RunConfig) -> Iterator[Fault]:
    if c.external:
        return
    for name, value in (
        ("rollout_engine_api_key_env", c.rollout_engine_api_key_env),
        ("rollout_engine_admin_key_env", c.rollout_engine_admin_key_env),
        ("rollout_engine_ca_file", c.rollout_engine_ca_file),
    ):
        if value is not None:
            yield Fault(specs()[name].flag, value, "the run starts its own engines", f"give {ADDRESSES}")


def not_with_external(c: RunConfig) -> Iterator[Fault]:
    """Somebody else has chosen these."""
    if not c.external:
        return
    for name, value in (
        ("engine", c.engine),
        ("sglang_config", c.sglang_config),
        ("rollout_num_gpus", c.rollout_num_gpus),
        ("colocate", c.colocate),
        ("rollout_num_engines", c.rollout_num_engines),
        ("rollout_num_gpus_per_engine", c.rollout_num_gpus_per_engine),
        ("engine_expert_parallel_size", c.engine_expert_parallel_size),
        ("engine_quantization", c.engine_quantization),
        ("engine_linger", c.engine_linger),
        ("custom_update_weight_pre_read_path", c.custom_update_weight_pre_read_path),
        ("admin_token_env", c.admin_token_env),
    ):
        if value != specs()[name].default:
            reason = f"external engines are what they were started as ({ADDRESSES})"
            yield Fault(specs()[name].flag, str(value), reason, "leave one of the two out")


def tensors_reach_them(c: RunConfig) -> Iterator[Fault]:
    """Handles of shared memory mean nothing on another host."""
    if c.update_weight_transport != "tensor":
        return
    for text in c.rollout_external_engine_addrs:
        if not _loopback(text):
            reason = f"{text} is not on this host, and shares no memory with it"
            remedy = "use --update-weight-transport group or disk"
            yield Fault("--update-weight-transport", "tensor", reason, remedy)


def authorities_are_asked(c: RunConfig) -> Iterator[Fault]:
    file = c.rollout_engine_ca_file
    if file is None:
        return
    https = any(text.startswith("https://") for text in c.rollout_external_engine_addrs)
    if not Path(file).is_file():
        yield Fault("--rollout-engine-ca-file", file, "no such file", "give a PEM file")
    elif not https and c.rollout_external_engine_file is None:
        yield Fault(
            "--rollout-engine-ca-file", file, "no engine is asked by https", "write https://HOST:PORT"
        )


def file_is_there(c: RunConfig) -> Iterator[Fault]:
    file = c.rollout_external_engine_file
    if file is not None and not Path(file).is_file():
        yield Fault("--rollout-external-engine-file", file, "no such file", "make it, if need be empty")


def _loopback(text: str) -> bool:
    try:
        address: Address = parse_address(text, ADDRESSES)
    except ConfigError:
        return True  # told elsewhere
    return address.loopback


EXTERNAL_CHECKS = (
    addresses_are_good,
    only_with_external,
    not_with_external,
    tensors_reach_them,
    authorities_are_asked,
    file_is_there,
)
