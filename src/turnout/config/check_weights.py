"""Which ways of a weight update go together. Rules as in turnout.config.checks.

Every pair of mode and transport is in `PAIRS`: None is legal, a text says why it is not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault

OBJECT_STORES = ("s3://", "gs://", "az://")
PAIRS: dict[tuple[str, str], str | None] = {
    ("full", "disk"): None,
    ("full", "tensor"): None,
    ("full", "group"): None,
    ("full", "checkpoint-engine"): None,
    ("full", "follower"): None,
    ("delta", "disk"): None,
    ("delta", "group"): None,
    ("delta", "follower"): None,
    ("delta", "tensor"): "a tensor travels as a handle of 64 bytes on one host, so a delta saves nothing",
    ("delta", "checkpoint-engine"): "its receiver loads whole tensors only",
}


def pair_is_legal(c: RunConfig) -> Iterator[Fault]:
    mode, transport = c.update_weight_mode, c.update_weight_transport
    reason = PAIRS[mode, transport]
    if reason is not None:
        same_mode = " or ".join(t for (m, t), no in PAIRS.items() if m == mode and no is None)
        same_transport = " or ".join(m for (m, t), no in PAIRS.items() if t == transport and no is None)
        remedy = (
            f"use --update-weight-transport {same_mode} with {mode}, "
            f"or --update-weight-mode {same_transport} with {transport}"
        )
        yield Fault("--update-weight-mode", f"{mode} by {transport}", reason, remedy)


def store_is_known(c: RunConfig) -> Iterator[Fault]:
    url = c.weight_url
    if url is not None and not url.startswith(OBJECT_STORES):
        reason = "is no object store that is known here"
        yield Fault("--update-weight-disk-dir", url, reason, f"use {' or '.join(OBJECT_STORES)}, or a folder")


def hook_names_a_function(c: RunConfig) -> Iterator[Fault]:
    for flag, path in (
        ("--custom-update-weight-post-write-path", c.custom_update_weight_post_write_path),
        ("--custom-update-weight-pre-read-path", c.custom_update_weight_pre_read_path),
    ):
        if path is not None and not path.rpartition(":")[2].rpartition(".")[2].isidentifier():
            remedy = "write package.module.function or path/to/file.py:function"
            yield Fault(flag, path, "names no function", remedy)


def hook_has_a_reader(c: RunConfig) -> Iterator[Fault]:
    if c.engine == "sglang" and c.custom_update_weight_pre_read_path is not None:
        reason = "a stock SGLang calls no hook before it reads"
        remedy = "leave it out, or give it to `turnout weights follow`"
        yield Fault(
            "--custom-update-weight-pre-read-path", c.custom_update_weight_pre_read_path, reason, remedy
        )


def encoding_is_used(c: RunConfig) -> Iterator[Fault]:
    if c.update_weight_encoding is None:
        return
    remedy = "leave it out, or use --update-weight-mode delta --update-weight-transport disk or follower"
    if c.update_weight_mode == "full":
        reason = "full versions hold the weights as they are"
        yield Fault("--update-weight-encoding", c.update_weight_encoding, reason, remedy)
    elif c.update_weight_transport == "group" and c.update_weight_encoding != "indices":
        reason = "a group carries positions and values as they are, which is `indices`"
        yield Fault("--update-weight-encoding", c.update_weight_encoding, reason, remedy)


def engine_applies_deltas(c: RunConfig) -> Iterator[Fault]:
    if c.engine == "sglang" and c.update_weight_mode == "delta":
        reason = "a stock SGLang applies no deltas"
        remedy = "use --update-weight-mode full, or `turnout weights follow` beside an engine of its own"
        yield Fault("--update-weight-mode", "delta", reason, remedy)


def quantised_engines(c: RunConfig) -> Iterator[Fault]:
    if c.engine_quantization == "none":
        return
    if c.update_weight_mode == "delta":
        reason = "a quantised engine does not hold the state that a delta is relative to"
        remedy = "use --update-weight-mode full, or a follower beside the engine"
        yield Fault("--engine-quantization", c.engine_quantization, reason, remedy)
    if c.rollout_num_gpus_per_engine > 1:
        reason = "is not served over several ranks"
        yield Fault("--engine-quantization", c.engine_quantization, reason, "use one rank per engine")


def engines_of_an_update(c: RunConfig) -> Iterator[Fault]:
    growing = c.rollout_external_engine_file is not None
    if c.min_engines is not None and c.min_engines > c.updated_engines and not growing:
        reason = f"the run has {c.updated_engines} engines that are updated"
        yield Fault("--min-engines", str(c.min_engines), reason, "give a smaller number")
    if c.max_engine_lag and c.schedule in ("sync", "pipelined"):
        reason = f"the {c.schedule} schedule asks no engine that is behind"
        yield Fault("--max-engine-lag", str(c.max_engine_lag), reason, "leave it out")


def checkpoint_engine_can_run(c: RunConfig) -> Iterator[Fault]:
    if c.update_weight_transport != "checkpoint-engine":
        return
    reasons: list[str] = []
    if c.engine != "sglang":
        reasons.append("only SGLang has its receiver")
    elif c.sglang_device != "cuda":
        reasons.append("its receiver runs on CUDA devices only")
    if importlib.util.find_spec("zmq") is None:
        reasons.append("pyzmq is not installed: `pip install turnout[checkpoint-engine]`")
    if reasons:
        remedy = "use --update-weight-transport disk, tensor or group"
        yield Fault("--update-weight-transport", "checkpoint-engine", "; ".join(reasons), remedy)


def followers_choose_the_time(c: RunConfig) -> Iterator[Fault]:
    if not c.followed:
        return
    flag, value = "--update-weight-transport", "follower"
    if not c.external:
        remedy = "give --rollout-external-engine-addrs, or another transport"
        yield Fault(flag, value, "the run starts its own engines, and no follower beside them", remedy)
    if c.schedule != "async" or c.deterministic:
        reason = "when an engine changes its weights is for its follower to say, not for the run"
        yield Fault(flag, value, reason, "use --schedule async without --deterministic, or another transport")
    elif c.weight_update_policy != "retract":
        reason = "a follower has its engine compute the KV of requests in flight again"
        yield Fault("--on-weight-update", c.weight_update_policy, reason, "leave it out")
    if c.check_weight_update_equal:
        reason = "followed engines prove their live weights anyway, and there may be newer ones by then"
        yield Fault("--check-weight-update-equal", "", reason, "leave it out")


WEIGHT_CHECKS = (
    pair_is_legal,
    store_is_known,
    hook_names_a_function,
    hook_has_a_reader,
    encoding_is_used,
    engine_applies_deltas,
    quantised_engines,
    engines_of_an_update,
    checkpoint_engine_can_run,
    followers_choose_the_time,
)
