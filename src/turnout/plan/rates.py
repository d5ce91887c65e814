"""How long the parts of a step take: reckoned from the machines, or measured. Pure.

Every number is a Figure, which says where it is from. Promises: a faster device or link never makes anything
slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from turnout.plan.batching import EnginePace
from turnout.plan.cluster import Cluster, Found
from turnout.plan.figures import Figure, assumed, given
from turnout.plan.layouts import STATE_BYTES, Fit, Layout, Work

READ, MULTIPLY = 0.7, 0.5  # shares of a device's memory and 16-bit speed that an engine reaches
MFU, CORE_MFU = 0.4, 0.3  # and a trainer
BITS_PER_CHANGE = 10.0  # of a packed delta (docs/benchmarks.md)
DENSITY = 0.02  # of elements that a step changes
ACTIVATE_S = 0.05


@dataclass(frozen=True)
class Measured:
    """What runs told, of an engine with `engine_devices` and a trainer with `train_devices`: seconds."""

    runs: str
    engine_devices: int
    train_devices: int
    base_s: float
    request_s: float
    prefill_s: float
    train_base_s: float
    train_token_s: float
    transport: str
    publish_s: float
    prepare_s: float
    activate_s: float
    rest_s: float = 0.0
    density: float | None = None


@dataclass(frozen=True)
class Rates:
    """For one layout. `train_base_s` is of each step, `train_token_s` of each token that it computes; `rest_s`:
    what a sync step takes besides."""

    base_s: Figure
    request_s: Figure
    prefill_token_s: Figure
    train_base_s: Figure
    train_token_s: Figure
    rest_s: Figure
    density: Figure

    def pace(self, work: Work, fit: Fit) -> EnginePace:
        """A group's prompt is computed once."""
        prefill = self.prefill_token_s.value * work.prompt / work.samples
        return EnginePace(self.base_s.value, self.request_s.value, prefill, fit.lanes)

    def train_s(self, work: Work) -> float:
        return self.train_base_s.value + self.train_token_s.value * work.tokens


@dataclass(frozen=True)
class Update:
    """A version's way: `publish_s` holds the trainer up, `prepare_s` is beside the requests, `activate_s`
    between."""

    transport: str
    publish_s: float
    prepare_s: float
    activate_s: float
    figure: Figure

    @property
    def seconds(self) -> float:
        return self.publish_s + self.prepare_s + self.activate_s


def rates(work: Work, layout: Layout, found: Found, known: Measured | None = None) -> Rates:
    """Of an engine and of the trainer of this layout."""
    if known is not None:
        return _measured(layout, known)
    cluster, knows = found.cluster, found.cluster.measured
    made = given if found.sure else assumed
    device, tp, shape = cluster.device, layout.tp, work.shape
    read = device.memory_gb_per_s * 1e9 * READ * tp
    multiply = device.tflops * 1e12 * MULTIPLY * tp
    hops = 2 * shape.layers * cluster.links.device.latency_us * 1e-6 if tp > 1 and not cluster.cores else 0.0
    context = work.prompt + work.mean / 2
    kv_read = shape.kv_bytes * context / (read / tp * min(tp, shape.kv_heads))
    flops = 2.0 * shape.active / multiply
    base = made(
        2.0 * shape.params / read + hops, f"weights read at {READ:.0%} of {device.name}'s memory speed"
    )
    how = f"KV of {context:.0f} tokens read, products at {MULTIPLY:.0%} of its TFLOP/s"
    request = made(kv_read + flops, how)
    prefill = made(flops, f"products at {MULTIPLY:.0%} of its TFLOP/s")
    train = made(*_train_token(work, layout, cluster))
    optimizer = 2.5 * STATE_BYTES * shape.params / (layout.train * device.memory_gb_per_s * 1e9)
    rest = assumed(0.0, "nothing else")
    if knows.decode_step_ms is not None:
        base = given(knows.decode_step_ms / 1e3, "measured.decode_step_ms")
    if knows.decode_request_ms is not None:
        request = given(knows.decode_request_ms / 1e3, "measured.decode_request_ms")
    if knows.prefill_tokens_per_s is not None:
        prefill = given(1 / (knows.prefill_tokens_per_s * tp), "measured.prefill_tokens_per_s")
    if knows.train_tokens_per_s is not None:
        train = given(1 / (knows.train_tokens_per_s * layout.train), "measured.train_tokens_per_s")
    density = assumed(DENSITY, "of elements that change in a step")
    return Rates(base, request, prefill, made(optimizer, "optimizer's memory traffic"), train, rest, density)


def _train_token(work: Work, layout: Layout, cluster: Cluster) -> tuple[float, str]:
    """The slower of products and of gathering what is sharded, which goes on beside them."""
    shape, device, n = work.shape, cluster.device, layout.train
    mfu = CORE_MFU if cluster.cores else MFU
    passes = 8.0 if work.checkpointing else 6.0
    multiply = passes * shape.active / (n * device.tflops * 1e12 * mfu)
    if n == 1 or cluster.cores:
        return multiply, f"products at {mfu:.0%} of {device.name}'s TFLOP/s"
    links, wide = cluster.links, cluster.devices_per_machine
    speed = links.device.gb_per_s if n <= wide else min(links.device.gb_per_s, links.network.gb_per_s / wide)
    gather = 8.0 * shape.params / (speed * 1e9) / (n * max(work.micro, work.longest))
    if gather > multiply:
        return gather, f"weights gathered and gradients scattered at {speed:.1f} GB/s"
    return multiply, f"products at {mfu:.0%} of {device.name}'s TFLOP/s"


def _measured(layout: Layout, known: Measured) -> Rates:
    """As measured, by the number of devices where that differs."""
    engine, train = known.engine_devices / layout.tp, known.train_devices / layout.train

    def of(value: float, factor: float, here: int, there: int) -> Figure:
        scaled = (
            "" if factor == 1 else f", as if {here} devices were {there / here:g} times as slow as {there}"
        )
        return Figure(value * factor, "measured", f"{known.runs}{scaled}")

    rollout = engine, layout.tp, known.engine_devices
    trainer = train, layout.train, known.train_devices
    density = known.density
    return Rates(
        of(known.base_s, *rollout),
        of(known.request_s, *rollout),
        of(known.prefill_s, *rollout),
        of(known.train_base_s, *trainer),
        of(known.train_token_s, *trainer),
        Figure(known.rest_s, "measured", known.runs),
        assumed(DENSITY, "of elements that change in a step")
        if density is None or density >= 1
        else Figure(density, "measured", known.runs),
    )


def updates(work: Work, layout: Layout, cluster: Cluster, known: Rates) -> list[Update]:
    """The ways that a version can take in this layout, the quickest first."""
    links, full = cluster.links, 2.0 * work.shape.params
    wide = layout.train + layout.rollout > cluster.devices_per_machine and cluster.machines > 1
    between = links.network if wide else links.device
    local, late = links.device.gb_per_s * 1e9 * (1 if cluster.cores else layout.tp), between.latency_us * 1e-6
    delta = work.shape.params * known.density.value * BITS_PER_CHANGE / 8
    scan = 2 * full / (cluster.device.memory_gb_per_s * 1e9 * layout.train)
    apply = full / (cluster.device.memory_gb_per_s * 1e9 * layout.tp)
    found: list[Update] = []

    def add(transport: str, publish_s: float, prepare_s: float, how: str) -> None:
        figure = assumed(publish_s + prepare_s, how)
        found.append(Update(transport, publish_s, prepare_s, ACTIVATE_S, figure))

    if layout.site:
        site = next(site for site in cluster.sites if site.name == layout.site)
        rate = site.gb_per_s * 1e9
        add(
            "follower",
            scan + delta / rate,
            delta / rate + apply + 4 * site.latency_s,
            "delta by object store",
        )
        return found
    gather = full / (links.network.gb_per_s * 1e9) if wide else 0.0
    if layout.kind != "disaggregated" or cluster.machines == 1:
        add("tensor", 0.0, full / local + gather + late, "handles: gathered, then copied")
    if layout.kind == "disaggregated" or not cluster.cores:
        add("group", 0.0, full / (between.gb_per_s * 1e9) + full / local + late, "broadcast")
    if links.disk is not None:
        disk, opens = links.disk.gb_per_s * 1e9, links.disk.latency_us * 1e-6
        add(
            "disk",
            full / disk + opens,
            full / disk + full / local + opens,
            "written, then read once a machine",
        )
        if layout.kind == "disaggregated":
            add("disk delta", scan + delta / disk + opens, delta / disk + apply + opens, "what changed")
    return sorted(found, key=lambda update: update.seconds)


def as_measured(ways: list[Update], known: Measured) -> list[Update]:
    """With the times of the way that was measured, first."""
    figure = Figure(known.publish_s + known.prepare_s, "measured", known.runs)
    seconds = {"publish_s": known.publish_s, "prepare_s": known.prepare_s, "activate_s": known.activate_s}
    found = [
        replace(way, figure=figure, **seconds) if way.transport == known.transport else way for way in ways
    ]
    return sorted(found, key=lambda way: way.transport != known.transport)
