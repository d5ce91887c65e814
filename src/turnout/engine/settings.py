"""Everything that an embedded engine is started with. No torch here, so that a launcher can build it.

Promises: a value that was made is consistent; otherwise ConfigError names every fault at once.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from turnout.core.errors import ConfigError, Fault

RUNNERS = ("auto", "fused", "module")
UNQUANTISED = "none"
QUANTIZATIONS = (UNQUANTISED, "int8", "fp8")
KERNEL_PAGE_TOKENS = 16  # the layout of native/attention.c
DISAGGREGATION_MODES = ("null", "prefill", "decode")
MAX_RANKS = 64


@dataclass(frozen=True)
class EngineSettings:
    """`max_total_tokens` is the size of the KV cache in tokens; `max_step_tokens` bounds the rows of one step
    (prefill is cut into chunks that fit); `max_waiting` bounds the queue, beyond it a request gets 429.
    `row_block` is the row count that every matrix product runs with, which makes a row's bits independent of
    the batch. `runner`: `fused` is the C path for Llama-like models in bf16, `module` that of transformers,
    `auto` the first where it can. `quantization` keeps the weights of linear layers, but the head's, in int8 per
    row or in fp8 blocks (engine.quantise): half the bytes, not faster on a CPU. `tp_size` ranks, each a process
    with `threads` threads, hold a part of the weights each; experts are divided over `ep_size` groups of ranks; a
    rank that does not answer within `rank_timeout_s` ends the engine. `context_length` None takes the model's.
    `allowed_roots`: folders that updates may read from; empty means any folder, on a loopback host only. Port 0
    lets the system choose.
    `disaggregation_mode` makes this one half of a PD pair (docs/guides/pd.md): `disaggregation_timeout_s` bounds
    each wait for the other half; `disaggregation_transfer` auto takes shared memory where both are on one host.
    `update_timeout_s` bounds every step of a weight update: staging, a group's meeting, the wait for tensors.
    After every `digest_audit_interval` updates that moved digests incrementally all are computed anew from the live
    tensors, in the background (0: never).
    `incremental_streaming_output`: events of a streamed /generate hold only what is new (engine.replies)."""

    model_path: Path
    engine_id: str = "engine-0"
    host: str = "127.0.0.1"
    port: int = 0
    dtype: str = "bfloat16"
    runner: str = "auto"
    quantization: str = UNQUANTISED
    threads: int = 1
    tp_size: int = 1
    ep_size: int = 1
    rank_timeout_s: float = 60.0
    page_tokens: int = KERNEL_PAGE_TOKENS
    max_total_tokens: int = 32768
    max_running_requests: int = 64
    max_waiting: int = 4096
    max_step_tokens: int = 512
    row_block: int = 64
    context_length: int | None = None
    admin_token: str | None = None
    allowed_roots: tuple[Path, ...] = ()
    weight_version: str = "default"
    served_model_name: str | None = None
    request_timeout_s: float = 600.0
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 0
    disaggregation_timeout_s: float = 120.0
    disaggregation_transfer: str = "auto"
    update_timeout_s: float = 600.0
    custom_update_weight_pre_read_path: str | None = None
    digest_audit_interval: int = 20
    incremental_streaming_output: bool = False

    def __post_init__(self) -> None:
        faults = [fault for fault in self._faults() if fault is not None]
        if faults:
            raise ConfigError(faults)

    def _wrong(self, bad: bool, name: str, reason: str, remedy: str = "") -> Fault | None:
        return Fault(f"engine.{name}", str(getattr(self, name)), reason, remedy) if bad else None

    def _parallel_faults(self) -> list[Fault | None]:
        wrong, ranks = self._wrong, f"tp_size = {self.tp_size}"
        return [
            wrong(not 1 <= self.tp_size <= MAX_RANKS, "tp_size", f"must be from 1 to {MAX_RANKS}"),
            wrong(self.ep_size < 1 or self.tp_size % self.ep_size != 0, "ep_size", f"must divide {ranks}"),
            wrong(
                self.tp_size > 1 and self.runner == "fused",
                "runner",
                f"does not run over {ranks} ranks",
                "use auto or module",
            ),
            wrong(
                self.tp_size > 1 and self.disaggregation_mode != "null",
                "disaggregation_mode",
                f"is not served over {ranks} ranks",
                "use one rank for each half of a pair",
            ),
            wrong(
                self.tp_size > 1 and self.quantization != UNQUANTISED,
                "quantization",
                f"is not served over {ranks} ranks",
                "use one rank",
            ),
            wrong(self.rank_timeout_s <= 0, "rank_timeout_s", "must be above 0"),
        ]

    def _faults(self) -> list[Fault | None]:
        wrong = self._wrong
        return [
            *self._parallel_faults(),
            wrong(self.dtype not in ("bfloat16", "float32"), "dtype", "must be bfloat16 or float32"),
            wrong(self.runner not in RUNNERS, "runner", f"must be one of {', '.join(RUNNERS)}"),
            wrong(
                self.quantization not in QUANTIZATIONS,
                "quantization",
                f"must be one of {', '.join(QUANTIZATIONS)}",
            ),
            wrong(self.threads < 1, "threads", "must be at least 1"),
            wrong(self.page_tokens != KERNEL_PAGE_TOKENS, "page_tokens", f"must be {KERNEL_PAGE_TOKENS}"),
            wrong(
                self.max_total_tokens < self.page_tokens, "max_total_tokens", "must hold at least one page"
            ),
            wrong(self.max_running_requests < 1, "max_running_requests", "must be at least 1"),
            wrong(self.max_waiting < 0, "max_waiting", "must be at least 0"),
            wrong(
                self.max_step_tokens < self.max_running_requests,
                "max_step_tokens",
                f"must be at least max_running_requests = {self.max_running_requests}, "
                "since each running request decodes one token a step",
            ),
            wrong(self.row_block < 8, "row_block", "must be at least 8"),
            wrong(not 0 <= self.port < 65536, "port", "must be from 0 to 65535"),
            wrong(self.request_timeout_s <= 0, "request_timeout_s", "must be above 0"),
            wrong(self.update_timeout_s <= 0, "update_timeout_s", "must be above 0"),
            wrong(self.digest_audit_interval < 0, "digest_audit_interval", "must be at least 0"),
            wrong(
                self.disaggregation_mode not in DISAGGREGATION_MODES,
                "disaggregation_mode",
                f"must be one of {', '.join(DISAGGREGATION_MODES)}",
            ),
            wrong(
                not 0 <= self.disaggregation_bootstrap_port < 65536,
                "disaggregation_bootstrap_port",
                "must be from 0 to 65535",
            ),
            wrong(self.disaggregation_timeout_s <= 0, "disaggregation_timeout_s", "must be above 0"),
            wrong(
                self.disaggregation_transfer not in ("auto", "tcp"),
                "disaggregation_transfer",
                "must be auto or tcp",
            ),
            wrong(
                self.context_length is not None and self.context_length < 1,
                "context_length",
                "must be at least 1",
            ),
            wrong(
                not self.loopback and not self.admin_token,
                "host",
                "control calls beyond loopback need a token",
                "set the admin token, or bind to 127.0.0.1",
            ),
        ]

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the engine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def pages(self) -> int:
        """Pages of the KV cache."""
        return self.max_total_tokens // self.page_tokens

    @property
    def model_name(self) -> str:
        return self.served_model_name if self.served_model_name is not None else str(self.model_path)
