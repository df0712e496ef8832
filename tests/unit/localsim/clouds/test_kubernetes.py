"""The official Kubernetes client and kubectl work with the simulated API server."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.host.system import SystemClock
from spotfit.model.offer import Market
from spotfit_localsim.clouds.http_server import WireRequest
from spotfit_localsim.clouds.kubernetes import _find_market, _quantity_mib
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator

kubernetes = pytest.importorskip("kubernetes.client")
pytestmark = pytest.mark.real_time("a simulated cloud runs in real time")

JOB: dict[str, Any] = {
    "metadata": {"name": "job"},
    "spec": {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "template": {
            "metadata": {"labels": {"app": "x"}},
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "agent",
                        "image": "i",
                        "command": ["/bin/sh", "-c", "echo I am $JOB_COMPLETION_INDEX; sleep 100"],
                    }
                ],
            },
        },
    },
}


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(
        tmp_path, SimOptions(cloud="kubernetes", boot_s=0.0, notice_s=5.0)
    ) as simulator:
        yield simulator


@pytest.fixture
def api(sim: Simulator) -> Any:
    return kubernetes.ApiClient(kubernetes.Configuration(host=sim.server.url))


def pods(api: Any, phase: str) -> list[Any]:
    clock = SystemClock()
    deadline_s = clock.now() + 20
    while True:
        listed = kubernetes.CoreV1Api(api).list_namespaced_pod("default", label_selector="app=x")
        found = [pod for pod in listed.items if pod.status.phase == phase]
        if len(found) == 2:
            return found
        assert clock.now() < deadline_s, listed
        clock.wait(0.02)


def test_client_library_parses_jobs_pods_and_logs(api: Any) -> None:
    created = kubernetes.BatchV1Api(api).create_namespaced_job("default", JOB)
    assert created.metadata.uid
    first, second = sorted(pods(api, "Running"), key=lambda pod: pod.metadata.name)
    assert first.status.pod_ip != second.status.pod_ip
    core = kubernetes.CoreV1Api(api)
    clock = SystemClock()
    while "I am" not in (log := core.read_namespaced_pod_log(first.metadata.name, "default")):
        clock.wait(0.02)
    assert log == "I am 0\n"


def test_pod_of_a_lost_node_has_the_condition_disruption_target(sim: Simulator, api: Any) -> None:
    kubernetes.BatchV1Api(api).create_namespaced_job("default", JOB)
    pods(api, "Running")
    sim.datacenter.reclaim(next(sim.datacenter.active_machines()), notice=False)
    clock = SystemClock()
    while True:
        listed = kubernetes.CoreV1Api(api).list_namespaced_pod("default").items
        conditions = [c.type for pod in listed for c in pod.status.conditions or []]
        if "DisruptionTarget" in conditions:
            break
        clock.wait(0.02)


def test_node_with_a_notice_is_tainted_before_its_pod_is_deleted(sim: Simulator, api: Any) -> None:
    kubernetes.BatchV1Api(api).create_namespaced_job("default", JOB)
    core, clock = kubernetes.CoreV1Api(api), SystemClock()
    name = pods(api, "Running")[0].spec.node_name
    assert core.read_node(name).spec.taints is None
    machine = next(one for one in sim.datacenter.active_machines() if name == f"spot-{one.number}")
    sim.datacenter.advise(machine)
    handler = "aws-node-termination-handler"
    taints = core.read_node(name).spec.taints
    assert [one.key for one in taints] == [f"{handler}/rebalance-recommendation"]
    sim.datacenter.reclaim(machine, notice=True)
    taints = core.read_node(name).spec.taints
    assert taints[0].key == f"{handler}/spot-itn"
    (pod,) = [one for one in pods(api, "Running") if one.spec.node_name == name]
    assert pod.metadata.deletion_timestamp is None
    while pod.metadata.deletion_timestamp is None:
        pod = core.read_namespaced_pod(pod.metadata.name, "default")
        clock.wait(0.02)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda api: kubernetes.BatchV1Api(api).read_namespaced_job("none", "default"), 404),
        (lambda api: kubernetes.CoreV1Api(api).list_namespaced_endpoints("default"), 404),
    ],
)
def test_missing_resource_is_reported_as_a_kubernetes_status(
    api: Any, call: Any, status: int
) -> None:
    with pytest.raises(kubernetes.exceptions.ApiException) as raised:
        call(api)
    assert raised.value.status == status
    assert '"kind":"Status"' in raised.value.body


def test_invalid_pod_replacement_policy_is_rejected(api: Any) -> None:
    spec = {**JOB["spec"], "podFailurePolicy": {"rules": []}, "podReplacementPolicy": "Always"}
    spec["podFailurePolicy"] = {"rules": [{"action": "Ignore"}]}
    with pytest.raises(kubernetes.exceptions.ApiException) as raised:
        kubernetes.BatchV1Api(api).create_namespaced_job("default", {**JOB, "spec": spec})
    assert raised.value.status == 422


KUBECTL = shutil.which("kubectl")


needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl is not installed; https://kubernetes.io/docs/tasks/tools"
)


def kubectl(sim: Simulator, *arguments: str, body: Any = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(KUBECTL), "--server", sim.server.url, "--cache-dir", str(sim.root), *arguments],
        input=msgspec.json.encode(body).decode(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@needs_kubectl
def test_kubectl_lists_pods_and_jobs(sim: Simulator, api: Any) -> None:
    kubernetes.BatchV1Api(api).create_namespaced_job("default", JOB)
    pods(api, "Running")
    result = kubectl(sim, "get", "pods,jobs")
    assert result.stdout.count("pod/job-") == 2
    assert "job.batch/job" in result.stdout


@needs_kubectl
def test_kubectl_shows_why_a_job_is_invalid(sim: Simulator) -> None:
    dry_run = ["create", "--dry-run=server", "--validate=false", "--output=name", "--filename=-"]
    job = {"apiVersion": "batch/v1", "kind": "Job", **JOB}
    assert kubectl(sim, *dry_run, body=job).stdout == "job.batch/job\n"
    job["metadata"] = {"name": "Job"}
    assert 'Job "Job" is invalid: metadata.name' in kubectl(sim, *dry_run, body=job).stderr


@needs_kubectl
def test_body_that_is_not_json_has_an_unsupported_media_type(sim: Simulator) -> None:
    """`kubectl auth can-i` sends protobuf, which real API servers know."""
    result = kubectl(sim, "auth", "can-i", "create", "jobs")
    assert "Error from server (UnsupportedMediaType)" in result.stderr


@pytest.mark.parametrize("text", ["2048Mi", "2Gi", "1500M", "3G", "2147483648", "128974848", "1e9"])
def test_quantities_of_memory_are_parsed_as_by_the_official_client(text: str) -> None:
    parse = pytest.importorskip("kubernetes.utils.quantity").parse_quantity
    assert _quantity_mib(text) == int(parse(text) / 2**20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda job: job["metadata"].update(name="Job"), "RFC 1123"),
        (lambda job: job["spec"]["template"]["spec"].update(containers=[]), "containers: Required"),
        (lambda job: job["spec"].pop("completions"), "completions: Required"),
        (lambda job: job["metadata"].update(name="a" * 62), "will not be able to create pod"),
    ],
)
def test_jobs_that_the_api_server_rejects_are_invalid(api: Any, change: Any, message: str) -> None:
    job = copy.deepcopy(JOB)
    change(job)
    with pytest.raises(kubernetes.ApiException) as failure:
        kubernetes.BatchV1Api(api).create_namespaced_job("default", job)
    assert failure.value.status == 422
    assert message in failure.value.body


def test_pods_have_only_members_of_the_api(sim: Simulator, api: Any) -> None:
    job = copy.deepcopy(JOB)
    job["spec"]["template"]["spec"]["containers"][0]["command"] = ["true"]
    kubernetes.BatchV1Api(api).create_namespaced_job("default", job)
    clock = SystemClock()
    while not kubernetes.BatchV1Api(api).read_namespaced_job("job", "default").status.conditions:
        clock.wait(0.02)
    for pod in sim.cloud.state.objects["pods"].values():
        assert set(pod) == {"apiVersion", "kind", "metadata", "spec", "status"}


@pytest.mark.parametrize(("part", "status"), [("", 200), ("/status", 200), ("/log", 404)])
def test_only_known_parts_of_a_resource_exist(
    sim: Simulator, api: Any, part: str, status: int
) -> None:
    kubernetes.BatchV1Api(api).create_namespaced_job("default", JOB)
    path = f"/apis/batch/v1/namespaces/default/jobs/job{part}"
    assert sim.cloud.answer_request(WireRequest("GET", path, {}, {}, b"")).status == status


def test_pod_waits_for_its_secret(sim: Simulator, api: Any) -> None:
    job = copy.deepcopy(JOB)
    container = job["spec"]["template"]["spec"]["containers"][0]
    container |= {
        "command": ["/bin/sh", "-c", "echo $A$B; exec sleep 100"],
        "envFrom": [{"secretRef": {"name": "s"}}],
        "env": [{"name": "B", "value": ""}],
    }
    kubernetes.BatchV1Api(api).create_namespaced_job("default", job)
    core, clock = kubernetes.CoreV1Api(api), SystemClock()
    while not (statuses := pods(api, "Pending")[0].status.container_statuses):
        clock.wait(0.02)
    assert statuses[0].state.waiting.reason == "CreateContainerConfigError"
    assert statuses[0].state.waiting.message == 'secret "s" not found'
    core.create_namespaced_secret("default", {"metadata": {"name": "s"}, "stringData": {"A": "x"}})
    name = pods(api, "Running")[0].metadata.name
    while core.read_namespaced_pod_log(name, "default") != "x\n":
        clock.wait(0.02)


def test_pod_without_a_job_runs(sim: Simulator, api: Any) -> None:
    """Its container has no JOB_COMPLETION_INDEX."""
    template = copy.deepcopy(JOB["spec"]["template"]["spec"])
    core, clock = kubernetes.CoreV1Api(api), SystemClock()
    template["containers"][0]["command"] = ["/bin/sh", "-c", "echo [$JOB_COMPLETION_INDEX]"]
    core.create_namespaced_pod("default", {"metadata": {"name": "p"}, "spec": template})
    while core.read_namespaced_pod("p", "default").status.phase != "Succeeded":
        clock.wait(0.02)
    assert core.read_namespaced_pod_log("p", "default") == "[]\n"


def avoids(name: str, operator: str, *values: str) -> dict[str, Any]:
    expression = {"key": name, "operator": operator, "values": list(values)}
    required = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


@pytest.mark.parametrize(
    ("pod", "market"),
    [
        ({}, Market.SPOT),
        ({"nodeSelector": {"pool": "a100"}}, Market.SPOT),
        ({"nodeSelector": {"karpenter.sh/capacity-type": "spot"}}, Market.SPOT),
        ({"nodeSelector": {"eks.amazonaws.com/capacityType": "ON_DEMAND"}}, Market.ON_DEMAND),
        ({"nodeSelector": {"karpenter.sh/capacity-type": "reserved"}}, None),
        ({"affinity": avoids("karpenter.sh/capacity-type", "NotIn", "spot")}, Market.ON_DEMAND),
        # A label that on-demand nodes do not have.
        ({"affinity": avoids("cloud.google.com/gke-spot", "NotIn", "true")}, Market.ON_DEMAND),
        ({"affinity": avoids("cloud.google.com/gke-spot", "DoesNotExist")}, Market.ON_DEMAND),
        ({"affinity": avoids("cloud.google.com/gke-spot", "Exists")}, Market.SPOT),
        ({"affinity": avoids("karpenter.sh/capacity-type", "In", "on-demand")}, Market.ON_DEMAND),
        ({"affinity": avoids("pool", "NotIn", "a100")}, Market.SPOT),
    ],
)
def test_pod_is_placed_on_nodes_with_its_labels(pod: dict[str, Any], market: Market | None) -> None:
    assert _find_market(pod) is market
