"""Rendering of an indexed Job, its Service and its Secret."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupRequest
from spotfit.provision.launch import AgentExitCode, AgentLaunchSpec
from spotfit_provisioners.kubernetes.options import KubernetesOptions
from spotfit_provisioners.kubernetes.render import (
    INDEX_VARIABLE,
    plan,
    secret_manifest,
    service_manifest,
)
from tests.unit.provisioners import golden

GOLDEN = Path(__file__).parent / "golden"
OPTIONS = KubernetesOptions(image="registry/spotfit:1")


def a_request(workers: int = 4, **resources: float) -> GroupRequest:
    return GroupRequest(
        token=Token("t-0123456789ab"),
        num_workers=workers,
        total_workers=workers,
        resources_per_worker=resources,
        run_name="Digits 1",
    )


@pytest.mark.parametrize(
    ("name", "request_", "options"),
    [
        ("plain", a_request(), OPTIONS),
        (
            "gke_gpus",
            a_request(8, GPU=1.0, CPU=6.0),
            KubernetesOptions(
                image="registry/spotfit:1-cuda",
                flavour="gke",
                workers_per_node=4,
                tolerations=({"key": "nvidia.com/gpu", "operator": "Exists"},),
                node_selector={"pool": "a100"},
                service_account="agent",
                image_pull_secrets=("registry",),
                priority_class="low",
                kueue_queue="team",
                grace_s=15.0,
            ),
        ),
        ("aks", a_request(1), KubernetesOptions(image="i", flavour="aks")),
    ],
)
def test_plan_matches_its_golden_file(
    name: str, request_: GroupRequest, options: KubernetesOptions
) -> None:
    golden.check_golden(plan(request_, options), GOLDEN / f"plan_{name}.json")


def test_run_key_is_in_a_secret_and_not_in_the_job() -> None:
    planned = plan(a_request(), OPTIONS)
    launch = AgentLaunchSpec("s3://bucket/run", RunId("r" * 32), "the secret itself")
    result = secret_manifest(
        planned, launch.environment_for(planned.token, 0, 1, node_index_variable=INDEX_VARIABLE)
    )
    assert result["stringData"]["SPOTFIT_RUN_SECRET"] == "the secret itself"
    assert b"the secret itself" not in msgspec.json.encode(planned)
    assert service_manifest(planned)["spec"]["publishNotReadyAddresses"]


def test_only_disruptions_and_drained_agents_restart_a_pod() -> None:
    disrupted, drained, final = plan(a_request(), OPTIONS).body["spec"]["podFailurePolicy"]["rules"]
    assert disrupted["action"] == drained["action"] == "Ignore"
    assert drained["onExitCodes"]["values"] == [int(AgentExitCode.DRAINED)]
    assert final["action"] == "FailIndex"
    assert final["onExitCodes"]["operator"] == "NotIn"


@pytest.mark.parametrize("flavour", ["eks", "karpenter"])
def test_eks_flavour_uses_labels_without_tolerations(flavour: str) -> None:
    options = KubernetesOptions(image="i", flavour=flavour)  # type: ignore[arg-type]  # two values
    pod = plan(a_request(), options).body["spec"]["template"]["spec"]
    assert pod["nodeSelector"]
    assert "tolerations" not in pod


def test_missing_image_names_the_option() -> None:
    with pytest.raises(ConfigError, match="image") as error_info:
        plan(a_request(), KubernetesOptions())
    assert "SPOTFIT_KUBERNETES_IMAGE" in error_info.value.do


def test_a_time_limit_is_the_deadline_of_the_job() -> None:
    planned = plan(replace(a_request(2), time_limit_s=7200), KubernetesOptions(image="i"))
    golden.check_golden(planned, GOLDEN / "plan_time_limit.json")
    assert planned.body["spec"]["activeDeadlineSeconds"] == 7200
