"""What the cluster says of a pod's node: only what means its end, while it may be asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent.notices.kubernetes import ClusterNode, KubernetesNotice
from spotfit.host.clocks import SystemClock
from spotfit.model.world import Advice, Notice
from spotfit_localsim.wire.http import Reply, Request, Server

pytestmark = pytest.mark.real_time("an API server answers in real time")


class Cluster:
    """An API server that knows one node."""

    def __init__(self) -> None:
        self.taints: list[str] | None = []
        self.status = 200
        self.asked: list[Request] = []

    def answer(self, request: Request) -> Reply:
        self.asked.append(request)
        if request.path != "/api/v1/nodes/spot-1":
            return Reply(404)
        taints = None if self.taints is None else [{"key": key} for key in self.taints]
        node = {"kind": "Node", "spec": {} if taints is None else {"taints": taints}}
        return Reply(self.status, json.dumps(node).encode())


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Server]:
    server = Server(cluster.answer)
    yield server
    server.close()


@pytest.fixture
def node(server: Server, tmp_path: Path) -> ClusterNode:
    return ClusterNode(server.url, "spot-1", account=tmp_path)


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
def test_a_node_that_stays_gives_no_notice(
    node: ClusterNode, cluster: Cluster, taints: list[str] | None
) -> None:
    cluster.taints = taints
    assert node.look() is None


@pytest.mark.parametrize(
    "key",
    [
        "aws-node-termination-handler/spot-itn",
        "cloud.google.com/impending-node-termination",
        "karpenter.sh/disrupted",
        "ToBeDeletedByClusterAutoscaler",
    ],
)
def test_a_taint_of_a_node_that_goes_is_a_notice_without_a_time(
    node: ClusterNode, cluster: Cluster, key: str
) -> None:
    cluster.taints = ["nvidia.com/gpu", key]
    notice = node.look()
    assert isinstance(notice, Notice)
    assert notice.reason.endswith(f"({key})")
    assert notice.seconds_left is None


def test_a_taint_of_a_node_in_danger_is_advice_until_it_goes(
    node: ClusterNode, cluster: Cluster
) -> None:
    cluster.taints = ["aws-node-termination-handler/rebalance-recommendation"]
    advice = node.look()
    assert isinstance(advice, Advice)
    assert node.look() == advice
    cluster.taints.append("aws-node-termination-handler/spot-itn")
    assert isinstance(node.look(), Notice)


@pytest.mark.parametrize("status", [401, 403])
def test_who_may_not_read_nodes_asks_once(node: ClusterNode, cluster: Cluster, status: int) -> None:
    cluster.status = status
    assert node.look() is None
    cluster.status, cluster.taints = 200, ["karpenter.sh/disrupted"]
    assert node.look() is None
    assert len(cluster.asked) == 1


def test_a_server_in_trouble_is_asked_again(node: ClusterNode, cluster: Cluster) -> None:
    cluster.status = 503
    with pytest.raises(ConnectionError, match="503"):
        node.look()
    cluster.status, cluster.taints = 200, ["karpenter.sh/disrupted"]
    assert node.look() is not None


def test_it_shows_the_token_of_the_moment(
    node: ClusterNode, cluster: Cluster, tmp_path: Path
) -> None:
    for token in ("first", "second"):
        (tmp_path / "token").write_text(f"{token}\n")
        node.look()
        assert cluster.asked[-1].headers["authorization"] == f"Bearer {token}"


def test_outside_a_cluster_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "SPOTFIT_KUBERNETES_API", "SPOTFIT_KUBERNETES_NODE"):
        monkeypatch.delenv(name, raising=False)
    source = KubernetesNotice(lambda: None, every_s=0.01)
    SystemClock().wait(0.05)
    assert source.poll(0.0) is None
    source.close()


def test_the_agent_is_woken(
    server: Server, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_KUBERNETES_API", server.url)
    monkeypatch.setenv("SPOTFIT_KUBERNETES_NODE", "spot-1")
    woken: list[bool] = []
    source = KubernetesNotice(lambda: woken.append(True), every_s=0.01)
    cluster.taints = ["karpenter.sh/disrupted"]
    clock = SystemClock()
    give_up_at = clock.now() + 20.0
    while not woken and clock.now() < give_up_at:
        clock.wait(0.01)
    assert source.poll(0.0) is not None
    source.close()
