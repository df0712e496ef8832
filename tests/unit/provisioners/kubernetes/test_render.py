"""Rendering of an indexed Job, its Service and its Secret."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    pod_manifest,
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
        # The usual line of Ray: ScalingConfig(num_workers=2, use_gpu=True).
        ("gpus_only", a_request(2, GPU=1.0), OPTIONS),
    ],
)
def test_plan_matches_its_golden_file(
    name: str, request_: GroupRequest, options: KubernetesOptions
) -> None:
    golden.check_golden(plan(request_, options), GOLDEN / f"plan_{name}.json")


def planned_pod(request: GroupRequest, options: KubernetesOptions = OPTIONS) -> dict[str, Any]:
    return dict(plan(request, options).body["spec"]["template"]["spec"])


def test_gpu_worker_has_a_memory_limit_only_if_it_requests_memory() -> None:
    pod = planned_pod(a_request(1, GPU=1.0))
    assert pod["containers"][0]["resources"] == {
        "requests": {
            "cpu": "3",
            "memory": "10240Mi",
            "nvidia.com/gpu": "1",
            "ephemeral-storage": "2048Mi",
        },
        "limits": {"nvidia.com/gpu": "1"},
    }
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory"}
    pod = planned_pod(a_request(1, GPU=1.0, memory=32 * 2**30))
    limits = {"memory": "32768Mi", "nvidia.com/gpu": "1"}
    assert pod["containers"][0]["resources"]["limits"] == limits
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16384Mi"}


def test_cpu_worker_has_limits_equal_to_its_requests() -> None:
    resources = planned_pod(a_request(1))["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "1", "memory": "2048Mi"}
    assert resources["requests"] == {**resources["limits"], "ephemeral-storage": "2048Mi"}


def test_memory_limit_that_would_kill_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"Kubernetes would kill .* memory limit of 2048 MiB"):
        plan(a_request(1, GPU=1.0, memory=2**31), OPTIONS)


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
    rules = plan(a_request(), OPTIONS).body["spec"]["podFailurePolicy"]["rules"]
    released, disrupted, drained, final = rules
    # Before the disruption: the agent of a disrupted pod exits if the run has replaced it.
    assert released["action"] == "FailIndex"
    assert released["onExitCodes"]["values"] == [int(AgentExitCode.RELEASED)]
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


def pod_template(options: KubernetesOptions) -> dict[str, Any]:
    template: dict[str, Any] = plan(a_request(), options).body["spec"]["template"]
    return template


def test_autoscalers_do_not_consolidate_the_nodes_of_pods() -> None:
    """Names: https://karpenter.sh/docs/concepts/disruption/ and the FAQ of the autoscaler."""
    assert pod_template(OPTIONS)["metadata"]["annotations"] == {
        "karpenter.sh/do-not-disrupt": "true",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    }


def test_overrides_of_the_pod_template_are_in_the_pods() -> None:
    overrides = {"metadata": {"annotations": {"a": "b"}}, "spec": {"hostNetwork": True}}
    template = pod_template(KubernetesOptions(image="i", pod_template=overrides))
    assert template["metadata"]["annotations"]["a"] == "b"
    assert "karpenter.sh/do-not-disrupt" in template["metadata"]["annotations"]
    assert template["spec"]["hostNetwork"] is True
    assert template["spec"]["containers"][0]["image"] == "i"


def test_pods_satisfy_the_restricted_pod_security_standard() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted."""
    pod = pod_template(OPTIONS)["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all(set(volume) <= {"name", "emptyDir"} for volume in pod["volumes"])


def test_pod_security_none_sets_no_security_context() -> None:
    pod = pod_template(KubernetesOptions(image="i", pod_security="none"))["spec"]
    assert "securityContext" not in pod
    assert "securityContext" not in pod["containers"][0]


def test_jobs_pods_secrets_and_services_have_labels_for_costs() -> None:
    options = KubernetesOptions(image="i", user="Jane.Doe", cost_project="Vision 2")
    planned = plan(replace(a_request(), run_id="0123abc"), options)
    expected = {
        "spotfit.dev/run": "digits-1",
        "spotfit.dev/run-id": "0123abc",
        "spotfit.dev/user": "jane-doe",
        "spotfit.dev/project": "vision-2",
        "spotfit.dev/token": "t-0123456789ab",
    }
    manifests = (planned.body, secret_manifest(planned, {}), service_manifest(planned))
    labelled = [*(one["metadata"]["labels"] for one in manifests)]
    labelled.append(planned.body["spec"]["template"]["metadata"]["labels"])
    assert labelled == [expected] * 4


def test_further_resources_are_requested_and_limited() -> None:
    options = KubernetesOptions(image="i", extra_resources={"vpc.amazonaws.com/efa": 4})
    resources = pod_template(options)["spec"]["containers"][0]["resources"]
    assert resources["limits"]["vpc.amazonaws.com/efa"] == "4"
    assert resources["requests"]["vpc.amazonaws.com/efa"] == "4"
    assert resources["requests"]["ephemeral-storage"] == "2048Mi"
    assert "ephemeral-storage" not in resources["limits"]


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        KubernetesOptions(
            image="i",
            flavour="aks",
            priority_class="low",
            image_pull_secrets=("x",),
            extra_resources={"rdma/hca": 1},
            pod_template={
                "metadata": {"annotations": {"a": "b"}},
                "spec": {
                    "containers": [{"name": "agent", "securityContext": {"privileged": False}}],
                    "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
                },
            },
        ),
    ],
)
def test_manifests_have_only_fields_and_types_of_the_client_library(
    options: KubernetesOptions,
) -> None:
    """The models of the client are generated from the OpenAPI document of Kubernetes."""
    client = pytest.importorskip("kubernetes.client")
    planned = plan(a_request(), options)
    manifests = {
        "V1Job": planned.body,
        "V1Secret": secret_manifest(planned, {"A": "b"}),
        "V1Service": service_manifest(planned),
        "V1Pod": pod_manifest(planned),
    }
    api = client.ApiClient()
    for model, manifest in manifests.items():
        response = SimpleNamespace(data=msgspec.json.encode(manifest).decode())
        try:
            parsed = api.deserialize(response, model)
        except TypeError:  # newer generators have the content type as third argument
            parsed = api.deserialize(response.data, model, "application/json")
        assert api.sanitize_for_serialization(parsed) == manifest, model


def test_a_time_limit_is_the_deadline_of_the_job() -> None:
    planned = plan(replace(a_request(2), time_limit_s=7200), KubernetesOptions(image="i"))
    golden.check_golden(planned, GOLDEN / "plan_time_limit.json")
    assert planned.body["spec"]["activeDeadlineSeconds"] == 7200
