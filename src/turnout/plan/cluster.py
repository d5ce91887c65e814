"""The machines that are planned for: a small YAML, or what this machine has.

Promises: an unknown key, a size that can't be, or a distant site without a link is told with its place, all at
once. Units are in the names: GB are 10^9 bytes, a rate is of one device (links `device`) or of one machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnout.config.reasons import shown
from turnout.core.errors import ConfigError, Fault
from turnout.placement.devices import visible_gpus

GB = 1e9
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Device(_Part):
    """One device: its memory, its dense 16-bit speed, and how fast it reads its memory."""

    name: str = "device"
    memory_gb: Positive
    tflops: Positive
    memory_gb_per_s: Positive


class Link(_Part):
    gb_per_s: Positive
    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class Links(_Part):
    """`device`: between devices of one machine, each; `network`: between machines, each; `host`: from a device to
    its machine's memory, each; `disk`: the folder that trainer and engines share, each machine; none: there is
    none."""

    device: Link = Link(gb_per_s=50, latency_us=10)
    network: Link = Link(gb_per_s=12.5, latency_us=30)
    host: Link = Link(gb_per_s=20, latency_us=10)
    disk: Link | None = Link(gb_per_s=1, latency_us=1000)


class Site(_Part):
    """Engines elsewhere: they can serve, and get weights through an object store."""

    name: str
    devices: Count
    gb_per_s: Positive
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1


class Measured(_Part):
    """What is known of a device with this model, in place of what its speed lets expect: a decode step of one
    engine takes `decode_step_ms` + `decode_request_ms` for each running request."""

    decode_step_ms: Positive | None = None
    decode_request_ms: Positive | None = None
    prefill_tokens_per_s: Positive | None = None
    train_tokens_per_s: Positive | None = None


class Cluster(_Part):
    """`cores`: devices are cores of one machine, whose memory is one: an engine or a trainer may have several."""

    name: str = "cluster"
    machines: Count = 1
    devices_per_machine: Count = 1
    device: Device
    links: Links = Links()
    sites: tuple[Site, ...] = ()
    measured: Measured = Measured()
    cores: bool = False

    @property
    def devices(self) -> int:
        return self.machines * self.devices_per_machine

    @property
    def memory(self) -> float:
        """Bytes of one device."""
        return self.device.memory_gb * GB


@dataclass(frozen=True)
class Found:
    """`source`: a file's name, or "this machine"; `sure` is False where its numbers are assumed."""

    cluster: Cluster
    source: str
    sure: bool


def read_cluster(path: Path) -> Found:
    """Raises ConfigError with everything that is wrong with the file."""
    flag = "--cluster-file"
    try:
        row = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(Fault(flag, str(path), f"can't be read: {reason}")) from None
    if not isinstance(row, dict):
        raise ConfigError(Fault(flag, str(path), "is no mapping", "see docs/guides/plan.md"))
    try:
        return Found(Cluster.model_validate(row), str(path), True)
    except ValidationError as error:
        raise ConfigError([_fault(path, dict(detail)) for detail in error.errors()]) from None


def _fault(path: Path, detail: dict[str, Any]) -> Fault:
    at = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        names = _keys(detail["loc"][:-1])
        return Fault(f"{path}: {at}", "", "there is no such key", f"there are: {', '.join(names)}")
    if detail["type"] == "missing":
        return Fault(f"{path}: {at}", "", "is needed")
    return Fault(f"{path}: {at}", shown(detail["input"]), detail["msg"].lower())


def _keys(where: tuple[Any, ...]) -> list[str]:
    parts: dict[str, type[_Part]] = {"device": Device, "links": Links, "sites": Site, "measured": Measured}
    if len(where) == 2 and where[0] == "links":
        return list(Link.model_fields)
    return list((parts.get(str(where[0]), Cluster) if where else Cluster).model_fields)


# GB, dense 16-bit TFLOP/s and GB/s of what NVIDIA's data sheets say; by words of the name that the driver gives it.
KNOWN = {
    "H200": (141.0, 989.0, 4800.0),
    "H100 80GB": (80.0, 989.0, 3350.0),
    "A100 80GB": (80.0, 312.0, 2039.0),
    "A100 40GB": (40.0, 312.0, 1555.0),
    "L40S": (48.0, 362.0, 864.0),
    "4090": (24.0, 165.0, 1008.0),
}
VARIANTS = frozenset({"NVL", "PCIe", "Laptop", "D", "MIG"})  # of H100, H200 and 4090, with other numbers
CORE_TFLOPS = {"amx_bf16": 0.6, "avx512f": 0.1, "avx2": 0.05}
OTHER_CORE_TFLOPS, CORE_GB_PER_S = 0.02, 12.0


def known_kind(name: str) -> str | None:
    """The key of KNOWN for a GPU's whole name, such as NVIDIA A100-SXM4-40GB."""
    words = set(re.split(r"[\s-]+", name))
    if "A100" not in words and words & VARIANTS:
        return None
    return next((kind for kind in KNOWN if words.issuperset(kind.split())), None)


def this_machine(proc: Path = Path("/proc")) -> Found:
    """GPUs where there are any, else cores. Raises ConfigError for a GPU that is not known here."""
    gpus = visible_gpus()
    if gpus:
        told = "\n".join(p.read_text() for p in proc.glob("driver/nvidia/gpus/*/information"))
        names = set(re.findall(r"^Model:[ \t]*(.*)", told, re.MULTILINE))
        kinds = {known_kind(name) for name in names}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None:
            reason = f"{gpus} GPUs of a kind that is not known here ({', '.join(sorted(names)) or 'no name'})"
            raise ConfigError(Fault("this machine", "", reason, "describe them with --cluster-file"))
        memory, tflops, speed = KNOWN[kind]
        device = Device(name=kind, memory_gb=memory, tflops=tflops, memory_gb_per_s=speed)
        return Found(Cluster(name="this machine", devices_per_machine=gpus, device=device), kind, False)
    cores = len(os.sched_getaffinity(0))
    flags = (proc / "cpuinfo").read_text() if (proc / "cpuinfo").is_file() else ""
    tflops = next((s for flag, s in CORE_TFLOPS.items() if flag in flags), OTHER_CORE_TFLOPS)
    found = re.search(r"MemTotal:\s+(\d+)", (proc / "meminfo").read_text())
    memory = int(found[1]) * 1024 / GB if found else 8.0
    device = Device(name="core", memory_gb=memory / cores, tflops=tflops, memory_gb_per_s=CORE_GB_PER_S)
    links = Links(device=Link(gb_per_s=10, latency_us=0), host=Link(gb_per_s=10))
    cluster = Cluster(name="this machine", devices_per_machine=cores, device=device, links=links, cores=True)
    return Found(cluster, "cores of this machine", False)
