"""The pure model: sizes from config.json, memory, batching, rates; what must be monotone is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.schedule_bound import Shop, best_makespan
from hypothesis import given, settings
from hypothesis import strategies as st

from turnout.core.errors import ConfigError
from turnout.plan.batching import EnginePace, batch_seconds, drawn, engine_seconds
from turnout.plan.cluster import KNOWN, Cluster, Device, Found, Link, Links, Site, this_machine
from turnout.plan.layouts import Layout, Work, fit, layouts
from turnout.plan.lengths import changed, expected
from turnout.plan.rates import rates, updates
from turnout.plan.search import best_of, candidates, smallest
from turnout.plan.shapes import shape_of
from turnout.plan.timing import Parts, predict, together

LLAMA_70B = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "intermediate_size": 28672,
}
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}
H100 = Device(name="H100", memory_gb=80, tflops=989, memory_gb_per_s=3350)
LINKS = Links(device=Link(gb_per_s=450, latency_us=3), network=Link(gb_per_s=400), disk=Link(gb_per_s=5))
CLUSTER = Cluster(machines=4, devices_per_machine=8, device=H100, links=LINKS)
WORK = Work(shape_of(LLAMA_70B, "x"), expected(4096), 256.0, 64, 8, 8192, checkpointing=True)
SMALL = replace(WORK, shape=shape_of(SMOLLM2, "x"))
SPLIT = Layout("disaggregated", 16, 2, 8)


def test_parameters_are_those_of_the_published_models() -> None:
    assert shape_of(LLAMA_70B, "x").params == 70_553_706_496
    assert shape_of(SMOLLM2, "x").params == 134_515_008
    assert shape_of(LLAMA_70B, "x").kv_bytes == 327_680


def test_a_mixture_computes_less_than_it_holds() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2048}
    shape = shape_of(SMOLLM2 | experts, "x")
    assert shape.active < shape.params / 2


@pytest.mark.parametrize("change", [{"hidden_size": 0}, {"kv_lora_rank": 512}, {"vocab_size": None}])
def test_what_is_not_counted_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        shape_of(LLAMA_70B | change, "config.json")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ([LLAMA_70B], "not a mapping"),
        (LLAMA_70B | {"text_config": "x"}, "not a mapping"),
        (SMOLLM2 | {"num_attention_heads": 577}, "num_attention_heads 577: is above hidden_size"),
        (LLAMA_70B | {"num_key_value_heads": [8]}, "num_key_value_heads"),
    ],
)
def test_a_config_that_is_no_good(config: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        shape_of(config, "config.json")


def test_a_text_config_that_is_null_is_none() -> None:
    assert shape_of(SMOLLM2 | {"text_config": None}, "x") == shape_of(SMOLLM2, "x")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_gpu_is_known_by_whole_words_of_its_name(
    name: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    file = tmp_path / "driver/nvidia/gpus/0000:01:00.0/information"
    file.parent.mkdir(parents=True)
    file.write_text(f"Model: \t\t {name}\nIRQ:   \t\t 12\n")
    if kind is None:
        with pytest.raises(ConfigError, match=rf"2 GPUs of a kind that is not known here \({name}\)"):
            this_machine(tmp_path)
        return
    found = this_machine(tmp_path).cluster
    assert (found.devices, found.device.name, found.device.memory_gb) == (2, kind, KNOWN[kind][0])


# Batching

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)
PACE = st.builds(EnginePace, st.floats(1e-3, 1), st.floats(0, 0.1), st.floats(0, 1), st.integers(1, 8))


@given(LENGTHS, PACE, st.floats(1, 3), st.integers(0, 2))
@settings(deadline=None)
def test_a_slower_engine_is_never_sooner_done(
    lengths: list[int], pace: EnginePace, factor: float, which: int
) -> None:
    name = ("base_s", "request_s", "prefill_s")[which]
    slower = replace(pace, **{name: getattr(pace, name) * factor})
    assert engine_seconds(lengths, slower)[0] >= engine_seconds(lengths, pace)[0] * (1 - 1e-9)


@given(LENGTHS, st.integers(1, 8))
@settings(deadline=None)
def test_lanes_that_do_not_slow_each_other_are_never_faster_than_the_best(
    lengths: list[int], lanes: int
) -> None:
    """The bound of the schedules' benchmark, for one step that takes no time."""
    seconds, used = engine_seconds(lengths, EnginePace(1.0, 0.0, 0.0, lanes))
    least = best_makespan([float(n) for n in lengths], Shop(lanes, len(lengths), 0.0))
    assert seconds >= least * (1 - 1e-6)
    assert used == pytest.approx(sum(lengths) / lanes)


def test_continuous_batching_by_hand() -> None:
    """4 and 2 tokens at once, then 3 in the freed lane: steps 1-2 with two, 3-4 with two, the last with one."""
    pace = EnginePace(1.0, 0.5, 0.0, 2)
    assert engine_seconds([4, 2, 3], pace)[0] == 4 * 2.0 + 1 * 1.5


def test_drawn_lengths_keep_their_distribution() -> None:
    found = drawn((1, 2, 3, 4), 400)
    assert sorted(found) == [1] * 100 + [2] * 100 + [3] * 100 + [4] * 100


def test_lengths_that_were_cut_go_on_to_the_new_limit() -> None:
    assert changed((5, 10, 10), 10, 20, 1.0) == (5, 20, 20)
    assert changed((5, 10), 10, 20, 3.0) == (15, 20)


# Memory


@given(st.sampled_from([40, 80, 141, 400]), st.integers(0, 60))
@settings(deadline=None)
def test_more_memory_never_makes_a_layout_unfit(memory: int, which: int) -> None:
    layout = (all_of := layouts(CLUSTER))[which % len(all_of)]
    less = CLUSTER.model_copy(update={"device": H100.model_copy(update={"memory_gb": memory})})
    more = CLUSTER.model_copy(update={"device": H100.model_copy(update={"memory_gb": memory * 1.5})})
    before, after = fit(WORK, layout, less, True), fit(WORK, layout, more, True)
    assert before.why or not after.why
    assert after.lanes >= before.lanes


def test_both_at_once_need_what_each_needs_in_turn_and_more() -> None:
    for tp in (1, 2, 4, 8):
        turns, both = Layout("time-sliced", 32, 32 // tp, tp), Layout("resident", 32, 32 // tp, tp)
        if fit(WORK, turns, CLUSTER, False).why:
            assert fit(WORK, both, CLUSTER, False).why
    assert "trainer" in fit(WORK, Layout("resident", 8, 1, 8), CLUSTER, True).why


# Rates


def bandwidths() -> st.SearchStrategy[str]:
    return st.sampled_from(["memory", "tflops", "device", "network", "disk", "host"])


def better(cluster: Cluster, what: str, factor: float) -> Cluster:
    device, links = cluster.device, cluster.links
    if what == "memory":
        device = device.model_copy(update={"memory_gb_per_s": device.memory_gb_per_s * factor})
    elif what == "tflops":
        device = device.model_copy(update={"tflops": device.tflops * factor})
    else:
        link = getattr(links, what)
        links = links.model_copy(update={what: link.model_copy(update={"gb_per_s": link.gb_per_s * factor})})
    return cluster.model_copy(update={"device": device, "links": links})


@given(bandwidths(), st.floats(1, 20), st.integers(0, 100), st.sampled_from([WORK, SMALL]))
@settings(deadline=None, max_examples=60)
def test_more_bandwidth_is_never_slower(what: str, factor: float, which: int, work: Work) -> None:
    faster = better(CLUSTER, what, factor)
    rows = candidates_by_name(work, CLUSTER)
    name = sorted(rows)[which % len(rows)]
    assert candidates_by_name(work, faster)[name] <= rows[name] * (1 + 1e-9)


def candidates_by_name(work: Work, cluster: Cluster) -> dict[str, float]:
    few = replace(work, groups=8, samples=4)
    return {row.name: row.step_s for row in candidates(few, Found(cluster, "test", True))}


def test_a_delta_is_quicker_than_a_full_version_over_a_slow_disk() -> None:
    slow = CLUSTER.model_copy(update={"links": LINKS.model_copy(update={"disk": Link(gb_per_s=0.5)})})
    ways = {
        way.transport: way.seconds
        for way in updates(WORK, SPLIT, slow, rates(WORK, SPLIT, Found(slow, "test", True)))
    }
    assert ways["disk delta"] < ways["disk"] / 10
    assert "tensor" not in ways  # no handle goes to another machine


def test_distant_engines_get_versions_by_an_object_store_and_are_never_waited_for() -> None:
    cluster = CLUSTER.model_copy(update={"sites": (Site(name="west", devices=16, gb_per_s=1.0),)})
    far = [row for row in candidates(WORK, Found(cluster, "test", True)) if row.layout.site]
    assert {row.schedule for row in far} == {"async"}
    assert {row.update.transport for row in far if row.update} == {"follower"}


# Schedules


def parts(train_s: float, **changes: float) -> Parts:
    way = updates(SMALL, SPLIT, CLUSTER, rates(SMALL, SPLIT, Found(CLUSTER, "test", True)))[0]
    return Parts(SMALL, 4, EnginePace(0.01, 1e-4, 0.0, 64), train_s, way, **changes)


@given(st.floats(0.01, 500), st.sampled_from([1.0, 1.5, 2.0]))
@settings(deadline=None)
def test_overlap_is_never_slower_than_waiting_nor_faster_than_the_slower_half(
    train_s: float, sharing: float
) -> None:
    one = parts(train_s, sharing=sharing)
    sync, pipelined, later = (
        predict(one, name, lead).step_s for name, lead in (("sync", 0), ("pipelined", 1), ("async", 2))
    )
    assert train_s <= pipelined * (1 + 1e-9)
    assert later >= max(train_s, one.generation_s(2.5)) * (1 - 1e-9)
    if sharing <= 2.0:
        assert pipelined <= sync * (1 + 1e-9)


def test_halves_that_share_devices_take_what_both_take() -> None:
    assert together(3.0, 5.0, 2.0) == 8.0
    assert together(3.0, 5.0, 1.0) == 5.0


def test_time_slices_are_chosen_where_both_do_not_fit_at_once_and_there_is_nothing_to_split() -> None:
    """The seed's table, against its chart: docs/choosing.md."""
    one = Cluster(device=H100, devices_per_machine=1)
    model = dict(SMOLLM2, hidden_size=2560, intermediate_size=6912, num_hidden_layers=46)
    work = replace(SMALL, shape=shape_of(model, "x"))
    rows = candidates(work, Found(one, "test", True))
    best = best_of(rows)
    assert best is not None and best.layout.kind == "time-sliced"
    assert all(row.prediction is None for row in rows if row.layout.kind == "resident")


def test_what_fits_nowhere_is_told_what_would_hold_it() -> None:
    one = Cluster(device=H100, devices_per_machine=8)
    rows = candidates(WORK, Found(one, "test", True))
    assert best_of(rows) is None
    assert "16 devices of 80 GB" in smallest(WORK, Found(one, "test", True)) or "32 devices" in smallest(
        WORK, Found(one, "test", True)
    )


def test_batches_are_dealt_to_all_engines() -> None:
    pace = EnginePace(0.01, 0.001, 0.0, 8)
    lengths = drawn(expected(400), 64)
    assert batch_seconds(lengths, 4, pace) < batch_seconds(lengths, 1, pace)
