"""Preemption notices of Kubernetes, from the taints of the node that runs this pod.

Termination handlers, Karpenter, the cluster autoscaler and GKE taint a node before they evict its
pods. The pod receives SIGTERM only with the eviction, so the taint is the earlier notice. Reading
the node requires the permission `get nodes` for the pod's service account; without it, SIGTERM is
the only notice.
https://github.com/aws/aws-node-termination-handler, https://karpenter.sh/docs/concepts/disruption/,
https://docs.cloud.google.com/kubernetes-engine/docs/concepts/handle-disruption-gpu-tpu
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec

from spotfit.agent.notices.polled import PolledNoticeSource, http_request
from spotfit.host import env, log
from spotfit.model.topology import Notice, PreemptionRisk

_SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# 1,000 nodes make 200 small requests a second to the API server.
_POLL_INTERVAL_S = 5.0
_RISK_TAINTS = {
    "aws-node-termination-handler/rebalance-recommendation": "EC2 recommends to replace the node",
}
"""Taints of nodes with an elevated risk of interruption."""
_EVICTION_TAINTS = {
    "aws-node-termination-handler/spot-itn": "AWS interrupts the spot instance",
    "aws-node-termination-handler/asg-lifecycle-termination": "its scaling group terminates it",
    "aws-node-termination-handler/scheduled-maintenance": "AWS will maintain the host",
    "cloud.google.com/impending-node-termination": "Google terminates the node",
    "karpenter.sh/disrupted": "Karpenter replaces the node",
    "karpenter.sh/disruption": "Karpenter replaces the node",
    "node.cloudprovider.kubernetes.io/shutdown": "the node shuts down",
    "ToBeDeletedByClusterAutoscaler": "the autoscaler deletes the node",
}
"""Taints of nodes whose pods will be evicted, with the reason for users."""


class _Taint(msgspec.Struct):
    key: str


class _Spec(msgspec.Struct):
    taints: list[_Taint] = []


class _Node(msgspec.Struct):
    spec: _Spec = msgspec.field(default_factory=_Spec)


class KubernetesNodeTaints:
    """Client of the API server, for this pod's node. Without `url` or `node` it finds nothing."""

    def __init__(
        self, url: str, node: str, service_account_dir: Path = _SERVICE_ACCOUNT_DIR
    ) -> None:
        self._url = url
        self._path = f"/api/v1/nodes/{node}"
        self._service_account_dir = service_account_dir
        self._tls_context: ssl.SSLContext | None = None
        self._can_read_node = bool(url and node)

    def check(self) -> Notice | PreemptionRisk | None:
        """Return a notice or a risk according to the node's taints, or None if it has neither.

        Sends a request to the API server: blocks, and raises `OSError`,
        `http.client.HTTPException` or `msgspec.DecodeError` if it fails or its answer is invalid.
        If reading the node is denied, this call and all
        later ones return None. Called by the thread of `KubernetesNoticeSource`.
        """
        taints = self._fetch_taints() if self._can_read_node else []
        # A node may have both kinds: an eviction that is certain precedes a risk.
        for key in taints:
            if key in _EVICTION_TAINTS:
                return Notice(reason=f"{_EVICTION_TAINTS[key]} ({key})")
        for key in taints:
            if key in _RISK_TAINTS:
                return PreemptionRisk(reason=f"{_RISK_TAINTS[key]} ({key})")
        return None

    def _fetch_taints(self) -> list[str]:
        """Return the keys of the node's taints; none from now on if they may not be read."""
        # Read for each request: Kubernetes rotates the token every hour.
        token = self._service_account_dir / "token"
        authority = self._service_account_dir / "ca.crt"
        if self._tls_context is None and authority.exists():
            self._tls_context = ssl.create_default_context(cafile=str(authority))
        response = http_request(
            self._url,
            self._path,
            headers={"Authorization": f"Bearer {token.read_text().strip()}"}
            if token.exists()
            else {},
            tls_context=self._tls_context,
        )
        # Permissions do not change during a run: further requests would only load the API server.
        if response.status in (401, 403):
            self._can_read_node = False
            log.info(
                "notice.node_access_denied",
                reason="the service account may not `get` nodes; SIGTERM is the only notice",
            )
            return []
        if response.status != 200:
            raise ConnectionError(
                f"The Kubernetes API server answered with status {response.status}, not 200."
            )
        return [taint.key for taint in msgspec.json.decode(response.body, type=_Node).spec.taints]


class KubernetesNoticeSource(PolledNoticeSource):
    """Polls the taints of this pod's node."""

    def __init__(self, wake: Callable[[], None], interval_s: float = _POLL_INTERVAL_S) -> None:
        url = env.read(env.KUBERNETES_API)
        # Set in every pod; absent outside of a cluster, where the source returns nothing.
        host, port = env.lookup("KUBERNETES_SERVICE_HOST"), env.lookup("KUBERNETES_SERVICE_PORT")
        if not url and host:
            url = f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"
        node = KubernetesNodeTaints(url, env.read(env.KUBERNETES_NODE))
        super().__init__(wake, node.check, interval_s=interval_s, name="kubernetes")
