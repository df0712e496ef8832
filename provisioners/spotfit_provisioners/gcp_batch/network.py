"""What machines need from the project: quotas, firewall rules and subnetworks.

Pure evaluation of descriptions of the Compute Engine API; `checkup` reads them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Metric of the quota by GPU type; of spot VMs it has the prefix PREEMPTIBLE_.
# https://docs.cloud.google.com/compute/resource-usage#gpu_quota
_GPU_METRICS: Mapping[str, str] = {
    "nvidia-l4": "NVIDIA_L4_GPUS",
    "nvidia-tesla-t4": "NVIDIA_T4_GPUS",
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
    "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
    "nvidia-h100-80gb": "NVIDIA_H100_GPUS",
    "nvidia-tesla-v100": "NVIDIA_V100_GPUS",
    "nvidia-tesla-p100": "NVIDIA_P100_GPUS",
    "nvidia-tesla-p4": "NVIDIA_P4_GPUS",
}
# GPUs that are part of machine types.
_GPU_BY_MACHINE: Mapping[str, str] = {
    "g2-standard-": "nvidia-l4",
    "a2-highgpu-": "nvidia-tesla-a100",
    "a2-megagpu-": "nvidia-tesla-a100",
    "a2-ultragpu-": "nvidia-a100-80gb",
    "a3-highgpu-": "nvidia-h100-80gb",
}
# Pascal and Volta: CUDA 13 supports Turing and later GPUs.
# https://docs.nvidia.com/cuda/archive/13.0.0/cuda-toolkit-release-notes/
_BEFORE_TURING = ("nvidia-tesla-v100", "nvidia-tesla-p100", "nvidia-tesla-p4", "nvidia-tesla-k80")
ALL_GPUS = "GPUS_ALL_REGIONS"
_EPHEMERAL_PORTS = (32768, 60999)  # net.ipv4.ip_local_port_range of Linux
_AUTO_MODE_RANGE = "10.128.0.0/9"
"""Contains the subnetworks of all networks in auto mode, such as `default`."""


def gpu_type(machine_type: str, accelerator: str) -> str:
    """Return the GPU type of a machine, as Compute Engine names it; '' if it has none we know."""
    if accelerator:
        return accelerator
    prefixes = (prefix for prefix in _GPU_BY_MACHINE if machine_type.startswith(prefix))
    return next((_GPU_BY_MACHINE[prefix] for prefix in prefixes), "")


def lacks_cuda_13(gpu: str) -> bool:
    """Return whether CUDA 13 does not support the GPU type."""
    return gpu in _BEFORE_TURING


def quota_limit(quotas: Iterable[Mapping[str, Any]], metric: str) -> tuple[str, float] | None:
    """Return metric and limit that apply to spot VMs; None if there is no such quota.

    Spot VMs use the quota of other VMs in regions without a quota for preemptible ones:
    https://docs.cloud.google.com/compute/resource-usage#preemptible_vm_quotas
    """
    limits = {str(one["metric"]): float(one["limit"]) for one in quotas}
    for name in (f"PREEMPTIBLE_{metric}", metric):
        if limits.get(name, 0.0) > 0:
            return name, limits[name]
    return (f"PREEMPTIBLE_{metric}", 0.0) if metric in limits else None


def missing_quotas(
    region_quotas: Sequence[Mapping[str, Any]],
    project_quotas: Sequence[Mapping[str, Any]],
    *,
    cpus: int,
    gpus: int,
    gpu: str,
) -> tuple[list[str], list[str]]:
    """Return the limits that do not suffice for one machine, and those that do, as text.

    `gpus` is the least number of GPUs of a machine, of the type `gpu` ('': not known).
    """
    found: list[tuple[tuple[str, float] | None, int]] = [(quota_limit(region_quotas, "CPUS"), cpus)]
    if gpus:
        limits = {str(one["metric"]): float(one["limit"]) for one in project_quotas}
        if ALL_GPUS in limits:
            found.append(((ALL_GPUS, limits[ALL_GPUS]), gpus))
        if metric := _GPU_METRICS.get(gpu):
            found.append((quota_limit(region_quotas, metric), gpus))
    known = [(limit, needed) for limit, needed in found if limit is not None]
    short = [f"{name} is {n:g}, needed {needed}" for (name, n), needed in known if n < needed]
    enough = [f"{name}: {n:g}" for (name, n), needed in known if n >= needed]
    return short, enough


def is_open_between_agents(
    firewalls: Iterable[Mapping[str, Any]],
    *,
    network: str,
    account: str,
    ranges: Sequence[str],
) -> bool | None:
    """Return whether a rule lets agents connect to each other; None if only rules for tags might.

    `network` is the name of the machines' network, `account` their service account, and `ranges`
    are the address ranges of its subnetworks in the region.
    """
    may_be_tagged = False
    for rule in firewalls:
        is_own = str(rule.get("network", "")).rpartition("/")[2] == network
        is_ingress = rule.get("direction", "INGRESS") == "INGRESS" and not rule.get("disabled")
        if not (is_own and is_ingress and any(map(_covers_ports, rule.get("allowed", [])))):
            continue
        targets = rule.get("targetServiceAccounts", [])
        if targets and account not in targets:
            continue
        if account in rule.get("sourceServiceAccounts", []) or _covers_ranges(
            rule.get("sourceRanges", []), ranges
        ):
            if not rule.get("targetTags"):
                return True
            may_be_tagged = True
        may_be_tagged = may_be_tagged or bool(rule.get("sourceTags"))
    return None if may_be_tagged else False


def _covers_ports(allowed: Mapping[str, Any]) -> bool:
    if allowed.get("IPProtocol") not in ("tcp", "all", "6"):
        return False
    ports = allowed.get("ports", [])
    bounds = [[int(one) for one in re.findall(r"\d+", text)] for text in ports]
    first, last = _EPHEMERAL_PORTS
    return not ports or any(pair[0] <= first and pair[-1] >= last for pair in bounds)


def _covers_ranges(sources: Sequence[str], ranges: Sequence[str]) -> bool:
    networks = [ipaddress.ip_network(source) for source in sources]
    wanted = [ipaddress.ip_network(one) for one in ranges or (_AUTO_MODE_RANGE,)]
    return all(
        any(one.version == source.version and one.subnet_of(source) for source in networks)  # type: ignore[arg-type]  # equal versions
        for one in wanted
    )


def bucket_serves_region(location: str, region: str) -> bool:
    """Return whether a bucket at `location`, such as 'US-CENTRAL1' or 'EU', is near `region`.

    Multi-regions are continents; a pair of regions (NAM4) is taken as near.
    https://docs.cloud.google.com/storage/docs/locations
    """
    place = location.lower()
    if "-" in place:
        return place == region
    continent = {"us": ("us-",), "eu": ("europe-",), "asia": ("asia-",)}.get(place)
    return continent is None or region.startswith(continent)
