"""The table of checks: from facts to findings. Pure functions, one for each line of the list.

Promises: a check without findings does not concern the run and has no line; of an engine that does not answer only
the line on addresses says so, others leave it out; a fault of one kind fails the line of that kind and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from turnout.config.checks import sglang_faults
from turnout.config.run_config import RunConfig
from turnout.serving.checklist.facts import UNTOUCHED, Deployment, EngineFacts, ModelFacts
from turnout.serving.checklist.here import CHECKED_SGLANG
from turnout.serving.checklist.lines import OPTIONS_CLAIM, Finding, Line, failed, proved, unknown
from turnout.serving.discovery import EngineInfo
from turnout.serving.roster import Program
from turnout.serving.weights_client import DELTA_FORMATS
from turnout.weights.retention import FULL_KEPT
from turnout.weights.store import PINS

HALVES = frozenset(("prefill", "decode"))
SGLANG = f"sglang-{CHECKED_SGLANG}"
DELTA_SHARE = 0.1  # of the weights in one delta: more than most at learning rates of RL (docs/benchmarks.md)
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Check:
    """One line: its name, what it claims, how to find out, and what to do where that does not hold."""

    name: str
    claim: str
    find: Callable[[Deployment], Iterator[Finding]]
    remedy: str


def lines(d: Deployment) -> list[Line]:
    """The list of a deployment, in the order of the table."""
    found = [(check, tuple(check.find(d))) for check in CHECKS]
    return [Line(check.name, check.claim, seen, check.remedy) for check, seen in found if seen]


def options(d: Deployment) -> Iterator[Finding]:
    yield proved(f"read and checked as `turnout train` does; run {d.config.run_name}")


def proxies(d: Deployment) -> Iterator[Finding]:
    named = ", ".join(d.here.proxies)
    seen = f"{named} would redirect them; no client here reads it" if named else "none is set"
    yield proved(seen, "environment")


def model(d: Deployment) -> Iterator[Finding]:
    facts = d.here.model
    if facts.folder is None:
        yield unknown(facts.fault, d.config.hf_checkpoint)
    elif not facts.elements:
        yield failed(facts.fault, d.config.hf_checkpoint)
    else:
        size = facts.elements * ITEM_BYTES[d.config.dtype]
        yield proved(
            f"every tensor's place was read: {facts.elements} values, {_size(size)}", str(facts.folder)
        )
    yield from d.here.others


def addresses(d: Deployment) -> Iterator[Finding]:
    for engine in d.engines:
        yield failed(engine.fault, engine.name) if engine.fault else proved("answered from here", engine.name)


def programs(d: Deployment) -> Iterator[Finding]:
    for engine in d.engines:
        if engine.strange:
            yield failed(engine.strange, engine.name)
    excluded = "; ".join(fault.line() for fault in sglang_faults(d.config))
    for engine, said in d.answering:
        if excluded and not said.ours:
            yield failed(f"{said.program}, which the run's options exclude: {excluded}", engine.name)
        elif said.ours or said.program == SGLANG:
            yield proved(said.program, engine.name)
        else:
            yield unknown(f"{said.program}; this program was checked against {SGLANG}", engine.name)


def models_match(d: Deployment) -> Iterator[Finding]:
    for engine, said in d.answering:
        yield _model_of(d.here.model, engine, said)


def _model_of(mine: ModelFacts, engine: EngineFacts, said: EngineInfo) -> Finding:
    held, name = engine.weights, engine.name
    for what, theirs, ours in said.model.differences(mine.identity):
        return failed(f"its {what} is {theirs}, the checkpoint's {ours}", name)
    if held is None:
        return unknown(f"what it has loaded could not be asked: {engine.weights_fault}", name)
    if engine.differs is not None:
        how = f"{len(held.checksums)} checksums of its live weights are the checkpoint's"
        return failed(engine.differs, name) if engine.differs else proved(how, name)
    if not mine.root:
        return unknown(f"the checkpoint here was not digested: {mine.fault}", name)
    if not held.root:
        return unknown(f"it has no digest; it names {engine.info.get('model_path')}", name)
    if held.root == mine.root:
        return proved(f"the digest of its live weights is the checkpoint's ({held.root[:16]})", name)
    if held.label != UNTOUCHED:
        return unknown(f"it serves {held.label}, weights of an earlier run, not the checkpoint", name)
    served = engine.info.get("model_path")
    return failed(f"serves {served}, digest {held.root[:16]}; the checkpoint's is {mine.root[:16]}", name)


def dtypes(d: Deployment) -> Iterator[Finding]:
    for engine, said in d.answering:
        if said.dtype == d.config.dtype:
            yield proved(f"computes in {said.dtype}, as the trainer", engine.name)
        else:  # `auto` tells nothing, and a run refuses it
            yield failed(
                f"has the dtype {said.dtype or 'unknown'}, the trainer {d.config.dtype}", engine.name
            )


def worker_types(d: Deployment) -> Iterator[Finding]:
    kinds = {said.mode if said.mode in HALVES else "regular" for _, said in d.answering}
    for engine, said in d.answering:
        if said.mode not in (*HALVES, "null", ""):
            yield failed(f"is a {said.mode} worker, which no run uses", engine.name)
        elif said.mode != "prefill":
            yield proved(said.mode if said.mode in HALVES else "regular", engine.name)
        elif said.bootstrap_port is not None:
            yield proved(f"prefill, bootstrap port {said.bootstrap_port}", engine.name)
        else:
            yield failed("prefill, and names no bootstrap port", engine.name)
    if "regular" in kinds and len(kinds) > 1:
        yield failed(f"{' and '.join(sorted(kinds))} engines serve one model")
    elif len(kinds) == 1 and kinds <= HALVES and len(d.answering) == len(d.engines):
        yield failed(f"there are only {kinds.pop()} engines: nobody does the other half")


def directory_writable(d: Deployment) -> Iterator[Finding]:
    store = d.here.store
    where = str(store.folder)
    if d.config.on_disk:
        yield failed(store.fault, where) if store.fault else proved("a file was written and removed", where)
    yield from d.here.depot


def directory_shared(d: Deployment) -> Iterator[Finding]:
    if d.config.update_weight_transport != "disk":
        return
    for engine, _ in d.answering:
        if engine.shared is not None:
            yield engine.shared


def disk_space(d: Deployment) -> Iterator[Finding]:
    if not d.config.on_disk:
        return
    store, elements = d.here.store, d.here.model.elements
    if store.free_bytes is None or not elements:
        reason = store.fault if elements else "the size of the model is not known"
        yield unknown(reason, str(store.folder))
        return
    least, most, why = _needed_bytes(d.config, elements * ITEM_BYTES[d.config.dtype])
    free, where = store.free_bytes, str(store.folder)
    if most is not None and most <= free:
        yield proved(f"{why} need {_size(most)} at most, {_size(free)} are free", where)
    elif least > free:
        yield failed(f"{why} need at least {_size(least)}, {_size(free)} are free", where)
    else:
        need = "how many is not known" if most is None else f"they may need {_size(most)}"
        yield unknown(f"{why}: {need}, {_size(free)} are free", where)


def _needed_bytes(c: RunConfig, version_bytes: int) -> tuple[int, int | None, str]:
    """The least and the most that the store comes to hold (turnout.weights.retention), and of what that is the sum.
    None: not known."""
    steps, keeps = c.num_rollout, c.update_weight_disk_keep_files
    published = None if steps is None else -(-steps // c.update_weights_interval)
    apart = _kept_apart(c, published)
    most = None if apart is None else FULL_KEPT + 1 + apart  # and the one that is being written
    if published is not None and most is not None:
        most = published if keeps else min(most, published)
    if c.update_weight_mode == "delta":  # the most: where anchors are due
        share, full = int(DELTA_SHARE * version_bytes), f"full versions of {_size(version_bytes)}"
        if published is None or most is None:
            return version_bytes + share, None, f"{full} and deltas of {DELTA_SHARE:.0%} of it"
        why = f"1 to {most} {full} and {published} deltas of {DELTA_SHARE:.0%} of it"
        return version_bytes + published * share, most * version_bytes + published * share, why
    if most is None or (keeps and published is None):
        return version_bytes, None, f"full versions of {_size(version_bytes)}"
    least = 1 if published is None else published if keeps else min(FULL_KEPT + 1, published)
    return least * version_bytes, most * version_bytes, f"{most} full versions of {_size(version_bytes)}"


def _kept_apart(c: RunConfig, published: int | None) -> int | None:
    """At most so many versions are kept for evaluations and checkpoints besides the newest; None: not known. Those
    after the last step are of the newest."""
    checkpoints = 0 if c.save_interval is None else PINS
    if c.eval_mode == "shared" or c.eval_interval is None:
        return checkpoints
    if c.num_rollout is None or published is None:
        return None
    return checkpoints + min(published, c.num_rollout // c.eval_interval)


def group(d: Deployment) -> Iterator[Finding]:
    if d.group is not None:
        yield d.group


def capabilities(d: Deployment) -> Iterator[Finding]:
    way = f"{d.config.update_weight_mode} by {d.config.update_weight_transport}"
    kinds = {
        "disk": ": prepare and activate",
        "tensor": ": shared memory",
        "follower": ": it proves what it holds",
    }
    how = kinds.get(d.config.update_weight_transport, "")
    for engine, said in d.answering:
        lacks = _lacks(d.config, engine, said)
        if lacks:
            yield failed(lacks, engine.name)
        elif said.ours:
            yield proved(way + how, engine.name)
        elif said.program == SGLANG:
            yield proved(f"{way}, as {SGLANG} does", engine.name)
        else:
            yield unknown(f"{way}: it does not say which ways it has", engine.name)


def _lacks(c: RunConfig, engine: EngineFacts, said: EngineInfo) -> str:
    """Why the engine can't take what the run sends; empty: it can, or it is not known."""
    if c.update_weight_mode == "delta" and not c.followed:
        needed = DELTA_FORMATS[c.update_weight_transport]
        if needed not in (engine.info.get("delta_formats") or ()):
            return (
                f"applies no deltas by {c.update_weight_transport} ({needed} is not among its delta_formats)"
            )
        if engine.info.get("quantization") not in (None, "none"):
            return f"holds {engine.info['quantization']} weights, to which no delta is relative"
    if c.update_weight_transport in ("tensor", "checkpoint-engine") and not engine.near:
        return f"{c.update_weight_transport} moves memory of one host, and this address is of another"
    if c.update_weight_transport == "checkpoint-engine" and said.device != "cuda":
        return "checkpoint-engine receives on CUDA devices only"
    return ""


def devices(d: Deployment) -> Iterator[Finding]:
    on_gpus = [p for p in d.plans if p.program is Program.SGLANG and d.config.sglang_device == "cuda"]
    there, needed = d.here.gpus, 1 + max((gpu for plan in on_gpus for gpu in plan.devices), default=-1)
    seen = f"{len(on_gpus)} engines lie on GPUs up to number {needed - 1}"
    if not needed:
        yield proved("no engine that the run starts needs a GPU")
    elif there is None:
        yield unknown(f"{seen}; GPUs of another maker than NVIDIA are not seen from here")
    else:
        yield (proved if needed <= there else failed)(f"{seen}, counted from 0; {there} are visible")


def sglang_program(d: Deployment) -> Iterator[Finding]:
    yield from d.here.sglang


def router(d: Deployment) -> Iterator[Finding]:
    yield from d.here.router


def fault_tolerance(d: Deployment) -> Iterator[Finding]:
    c = d.config
    watch = (
        f"every {c.rollout_health_check_interval:g} s, a probe within {c.rollout_health_check_timeout:g} s"
    )
    if d.engines:
        yield proved(
            f"watched {watch}, fenced when they fail, their requests go on elsewhere; never started again",
            f"{len(d.engines)} engines of somebody else",
        )
    elif c.use_fault_tolerance:
        yield proved(f"watched {watch}, started again up to {c.restarts} times in 10 minutes", "engines")
    else:
        yield proved(f"watched {watch}; one that ends ends the run (no --use-fault-tolerance)", "engines")
    yield proved(
        "never started again: the same command goes on from the last checkpoint", "trainer and controller"
    )


def _size(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


CHECKS = (
    Check("options", OPTIONS_CLAIM, options, ""),
    Check("proxies", "no proxy comes between this run and its engines", proxies, ""),
    Check(
        "model",
        "checkpoints are here and whole",
        model,
        "fetch it first: `turnout model fetch`, or give a folder",
    ),
    Check(
        "addresses",
        "every engine's address is reachable from here",
        addresses,
        "start the engine, open its port to this host, or mend --rollout-external-engine-addrs",
    ),
    Check(
        "engine program",
        "a program and version that is known here",
        programs,
        f"use {SGLANG}, and options that it has",
    ),
    Check(
        "engine model",
        "every engine serves the run's model",
        models_match,
        "start the engine with the checkpoint of --hf-checkpoint",
    ),
    Check(
        "engine dtype",
        "engines and trainer compute in one dtype",
        dtypes,
        "start the engine with --dtype of the run",
    ),
    Check(
        "worker types",
        "engines are whole, or prefill with a bootstrap port and decode",
        worker_types,
        "start prefill engines with --disaggregation-bootstrap-port, and both halves",
    ),
    Check(
        "weight directory",
        "versions can be written to --update-weight-disk-dir",
        directory_writable,
        "mount it for writing on this host, or give another folder",
    ),
    Check(
        "shared directory",
        "engines see the same --update-weight-disk-dir",
        directory_shared,
        "mount the same file system at the same path on the engine's host (and name it in its --allowed-root)",
    ),
    Check(
        "disk space",
        "the store of versions fits",
        disk_space,
        "free some, give another --update-weight-disk-dir, or keep fewer versions",
    ),
    Check(
        "process group",
        "trainer and engines come together in one group",
        group,
        "open the ports between the hosts, or use --update-weight-transport disk",
    ),
    Check(
        "update path",
        "every engine has the chosen way of updates",
        capabilities,
        "use --update-weight-mode full --update-weight-transport disk, or a follower beside the engine",
    ),
    Check(
        "devices",
        "there are as many devices as are needed",
        devices,
        "use fewer engines, or a larger machine",
    ),
    Check("SGLang", "the program that the run starts is there", sglang_program, "give --sglang-python"),
    Check(
        "router", "the router is there and the run's alone", router, "install it, or have one without workers"
    ),
    Check("fault tolerance", "what is watched, and what is never started again", fault_tolerance, ""),
)
