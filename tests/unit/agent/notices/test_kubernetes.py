"""Tests of the Kubernetes notice source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent.notices.kubernetes import KubernetesNodeTaints, KubernetesNoticeSource
from spotfit.host.system import SystemClock
from spotfit.model.topology import Notice, PreemptionRisk
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse, WireServer

pytestmark = pytest.mark.real_time("an API server answers in real time")


class Cluster:
    """An API server with one node."""

    def __init__(self) -> None:
        self.taints: list[str] | None = []
        self.status = 200
        self.requests: list[WireRequest] = []

    def answer(self, request: WireRequest) -> WireResponse:
        self.requests.append(request)
        if request.path != "/api/v1/nodes/spot-1":
            return WireResponse(404)
        taints = None if self.taints is None else [{"key": key} for key in self.taints]
        node = {"kind": "Node", "spec": {} if taints is None else {"taints": taints}}
        return WireResponse(self.status, json.dumps(node).encode())


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def server(cluster: Cluster) -> Iterator[WireServer]:
    server = WireServer(cluster.answer)
    yield server
    server.close()


@pytest.fixture
def node(server: WireServer, tmp_path: Path) -> KubernetesNodeTaints:
    return KubernetesNodeTaints(server.url, "spot-1", service_account_dir=tmp_path)


@pytest.mark.parametrize(
    "taints",
    [
        None,
        [],
        ["cloud.google.com/gke-spot", "nvidia.com/gpu"],
        ["DeletionCandidateOfClusterAutoscaler"],
        ["node.kubernetes.io/unschedulable"],
    ],
)
def test_an_untainted_node_has_no_notice(
    node: KubernetesNodeTaints, cluster: Cluster, taints: list[str] | None
) -> None:
    cluster.taints = taints
    assert node.check() is None


@pytest.mark.parametrize(
    "key",
    [
        "aws-node-termination-handler/spot-itn",
        "cloud.google.com/impending-node-termination",
        "karpenter.sh/disrupted",
        "ToBeDeletedByClusterAutoscaler",
    ],
)
def test_an_eviction_taint_is_a_notice_without_deadline(
    node: KubernetesNodeTaints, cluster: Cluster, key: str
) -> None:
    cluster.taints = ["nvidia.com/gpu", key]
    notice = node.check()
    assert isinstance(notice, Notice)
    assert notice.reason.endswith(f"({key})")
    assert notice.seconds_left is None


def test_a_risk_taint_is_a_risk_until_the_eviction_taint(
    node: KubernetesNodeTaints, cluster: Cluster
) -> None:
    cluster.taints = ["aws-node-termination-handler/rebalance-recommendation"]
    advice = node.check()
    assert isinstance(advice, PreemptionRisk)
    assert node.check() == advice
    cluster.taints.append("aws-node-termination-handler/spot-itn")
    assert isinstance(node.check(), Notice)


@pytest.mark.parametrize("status", [401, 403])
def test_a_denied_request_is_not_repeated(
    node: KubernetesNodeTaints, cluster: Cluster, status: int
) -> None:
    cluster.status = status
    assert node.check() is None
    cluster.status, cluster.taints = 200, ["karpenter.sh/disrupted"]
    assert node.check() is None
    assert len(cluster.requests) == 1


def test_a_server_error_is_retried(node: KubernetesNodeTaints, cluster: Cluster) -> None:
    cluster.status = 503
    with pytest.raises(ConnectionError, match="503"):
        node.check()
    cluster.status, cluster.taints = 200, ["karpenter.sh/disrupted"]
    assert node.check() is not None


def test_the_current_token_is_sent(
    node: KubernetesNodeTaints, cluster: Cluster, tmp_path: Path
) -> None:
    for token in ("first", "second"):
        (tmp_path / "token").write_text(f"{token}\n")
        node.check()
        assert cluster.requests[-1].headers["authorization"] == f"Bearer {token}"


def test_outside_a_cluster_no_request_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "SPOTFIT_KUBERNETES_API", "SPOTFIT_KUBERNETES_NODE"):
        monkeypatch.delenv(name, raising=False)
    source = KubernetesNoticeSource(lambda: None, interval_s=0.01)
    SystemClock().wait(0.05)
    assert source.poll(0.0) is None
    source.close()


def test_the_agent_is_woken(
    server: WireServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_KUBERNETES_API", server.url)
    monkeypatch.setenv("SPOTFIT_KUBERNETES_NODE", "spot-1")
    woken: list[bool] = []
    source = KubernetesNoticeSource(lambda: woken.append(True), interval_s=0.01)
    cluster.taints = ["karpenter.sh/disrupted"]
    clock = SystemClock()
    deadline_s = clock.now() + 20.0
    while not woken and clock.now() < deadline_s:
        clock.wait(0.01)
    assert source.poll(0.0) is not None
    source.close()
