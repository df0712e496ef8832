"""Evaluation of quotas, firewall rules and locations of Google Cloud."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit_provisioners.gcp_batch.network import (
    bucket_serves_region,
    gpu_type,
    is_open_between_agents,
    missing_quotas,
    quota_limit,
)

AGENT = "agents@project.iam.gserviceaccount.com"


def quotas(**limits: float) -> list[dict[str, Any]]:
    return [{"metric": metric, "limit": limit} for metric, limit in limits.items()]


def test_quota_of_preemptible_machines_applies_if_there_is_one() -> None:
    both = quotas(CPUS=24.0, PREEMPTIBLE_CPUS=8.0)
    assert quota_limit(both, "CPUS") == ("PREEMPTIBLE_CPUS", 8.0)
    assert quota_limit(quotas(CPUS=24.0, PREEMPTIBLE_CPUS=0.0), "CPUS") == ("CPUS", 24.0)
    assert quota_limit(quotas(CPUS=0.0), "CPUS") == ("PREEMPTIBLE_CPUS", 0.0)
    assert quota_limit([], "CPUS") is None


def test_quotas_of_all_gpus_and_of_the_type_are_needed() -> None:
    region = quotas(CPUS=24.0, NVIDIA_L4_GPUS=1.0)
    short, enough = missing_quotas(
        region, quotas(GPUS_ALL_REGIONS=0.0), cpus=1, gpus=1, gpu="nvidia-l4"
    )
    assert short == ["GPUS_ALL_REGIONS is 0, needed 1"]
    assert enough == ["CPUS: 24", "NVIDIA_L4_GPUS: 1"]
    assert missing_quotas(region, [], cpus=1, gpus=0, gpu="") == ([], ["CPUS: 24"])


def test_machine_types_with_built_in_gpus_are_known() -> None:
    assert gpu_type("g2-standard-8", "") == "nvidia-l4"
    assert gpu_type("a2-ultragpu-1g", "") == "nvidia-a100-80gb"
    assert gpu_type("n1-standard-8", "nvidia-tesla-t4") == "nvidia-tesla-t4"
    assert not gpu_type("n2-standard-8", "")


def rule(**fields: Any) -> dict[str, Any]:
    return {
        "network": "https://www.googleapis.com/compute/v1/projects/p/global/networks/default",
        "allowed": [{"IPProtocol": "tcp"}],
        **fields,
    }


@pytest.mark.parametrize(
    ("firewall", "is_open"),
    [
        (rule(sourceServiceAccounts=[AGENT], targetServiceAccounts=[AGENT]), True),
        (rule(sourceServiceAccounts=[AGENT], targetServiceAccounts=["other@x"]), False),
        (rule(sourceRanges=["10.128.0.0/9"]), True),
        (rule(sourceRanges=["10.128.0.0/9"], disabled=True), False),
        (rule(sourceRanges=["10.128.0.0/9"], direction="EGRESS"), False),
        (rule(sourceRanges=["10.128.0.0/9"], network="x/other"), False),
        (rule(sourceRanges=["35.191.0.0/16"]), False),
        (
            rule(
                sourceRanges=["0.0.0.0/0"], allowed=[{"IPProtocol": "tcp", "ports": ["22", "443"]}]
            ),
            False,
        ),
        (
            rule(sourceRanges=["0.0.0.0/0"], allowed=[{"IPProtocol": "tcp", "ports": ["0-65535"]}]),
            True,
        ),
        (rule(sourceRanges=["0.0.0.0/0"], allowed=[{"IPProtocol": "icmp"}]), False),
        (rule(sourceTags=["agents"], targetTags=["agents"]), None),
        (rule(sourceRanges=["10.128.0.0/9"], targetTags=["agents"]), None),
    ],
)
def test_agents_connect_if_a_rule_covers_them(
    firewall: dict[str, Any], is_open: bool | None
) -> None:
    result = is_open_between_agents(
        [firewall], network="default", account=AGENT, ranges=["10.128.0.0/20"]
    )
    assert result is is_open


@pytest.mark.parametrize(
    ("location", "region", "is_near"),
    [
        ("US-CENTRAL1", "us-central1", True),
        ("US-EAST1", "us-central1", False),
        ("US", "us-central1", True),
        ("EU", "us-central1", False),
        ("NAM4", "us-central1", True),
    ],
)
def test_bucket_is_near_machines_of_its_location(location: str, region: str, is_near: bool) -> None:
    assert bucket_serves_region(location, region) is is_near
