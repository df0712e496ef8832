"""What a cluster knows of the node below this pod: taints of a node that will be drained.

Whoever hears of a reclaim first (a termination handler, Karpenter, the autoscaler, GKE before it
maintains a host) taints the node, and evicts its pods later. The pod's own SIGTERM comes with the
eviction: what is heard here is earlier. To read a node takes the right to `get` nodes, for the
pod's service account; without it, SIGTERM is all there is.
https://github.com/aws/aws-node-termination-handler, https://karpenter.sh/docs/concepts/disruption/,
https://docs.cloud.google.com/kubernetes-engine/docs/concepts/handle-disruption-gpu-tpu
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec

from spotfit.agent.notices.polled import PolledNotice, whole_answer
from spotfit.host import env, log
from spotfit.model.world import Advice, Notice

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EVERY_S = 5.0
_SOON = {
    "aws-node-termination-handler/rebalance-recommendation": "EC2 sees a higher risk for the node",
}
"""Taints of nodes that are in danger, and will perhaps never go."""
_GOES = {
    "aws-node-termination-handler/spot-itn": "AWS takes it back",
    "aws-node-termination-handler/asg-lifecycle-termination": "its scaling group ends it",
    "aws-node-termination-handler/scheduled-maintenance": "AWS will maintain it",
    "cloud.google.com/impending-node-termination": "Google ends it",
    "karpenter.sh/disrupted": "Karpenter disrupts it",
    "karpenter.sh/disruption": "Karpenter disrupts it",
    "node.cloudprovider.kubernetes.io/shutdown": "it shuts down",
    "ToBeDeletedByClusterAutoscaler": "the autoscaler deletes it",
}
"""Taints of nodes whose pods will be evicted, and what they mean."""


class _Taint(msgspec.Struct):
    key: str


class _Spec(msgspec.Struct):
    taints: list[_Taint] = []


class _Node(msgspec.Struct):
    spec: _Spec = msgspec.field(default_factory=_Spec)


class ClusterNode:
    """This pod's node, as the API server describes it."""

    def __init__(self, url: str, node: str, account: Path = _ACCOUNT) -> None:
        self._url = url
        self._path = f"/api/v1/nodes/{node}"
        self._account = account
        self._trust: ssl.SSLContext | None = None
        self._may_read = bool(url and node)

    def look(self) -> Notice | Advice | None:
        """The notice, if the node bears a taint that is one; else the advice, if one is that."""
        taints = self._taints() if self._may_read else []
        for key in taints:
            if key in _GOES:
                return Notice(f"{_GOES[key]} ({key})")
        return next((Advice(f"{_SOON[key]} ({key})") for key in taints if key in _SOON), None)

    def _taints(self) -> list[str]:
        answer = whole_answer(self._url, self._path, headers=self._proof(), trust=self._trusted())
        if answer.status in (401, 403):
            self._may_read = False
            log.info("notice.node_unreadable", what_holds="SIGTERM tells when this pod must go")
            return []
        if answer.status != 200:
            raise ConnectionError(f"the API server answers {answer.status}")
        return [taint.key for taint in msgspec.json.decode(answer.body, type=_Node).spec.taints]

    def _proof(self) -> dict[str, str]:
        """Read anew each time: such tokens last an hour."""
        token = self._account / "token"
        return {"Authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}

    def _trusted(self) -> ssl.SSLContext | None:
        authority = self._account / "ca.crt"
        if self._trust is None and authority.exists():
            self._trust = ssl.create_default_context(cafile=str(authority))
        return self._trust


class KubernetesNotice(PolledNotice):
    """Asks every few seconds: a thousand nodes are two hundred small requests a second."""

    def __init__(self, wake: Callable[[], None], every_s: float = _EVERY_S) -> None:
        url = env.value(env.KUBERNETES_API) or _in_cluster()
        node = ClusterNode(url, env.value(env.KUBERNETES_NODE))
        super().__init__(wake, node.look, every_s=every_s, name="kubernetes")


def _in_cluster() -> str:
    """As Kubernetes tells its pods; '' where this is none."""
    host, port = env.lookup("KUBERNETES_SERVICE_HOST"), env.lookup("KUBERNETES_SERVICE_PORT")
    if not host:
        return ""
    return f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"
