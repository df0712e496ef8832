"""The part of a Kubernetes API server that groups need, for the real client and for kubectl.

Indexed Jobs with pod failure policies, pods and their logs, Secrets, Services, nodes, and access
reviews. Behaviour as documented:
https://kubernetes.io/docs/concepts/workloads/controllers/job/ and
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions.

Phases of a pod:

    Pending | a machine is rented and has booted           | Running
    Running | exit code 0                                  | Succeeded
    Running | another exit code, or the node is terminated | Failed
    Running | preemption notice: evicted with SIGTERM      | Succeeded or Failed
"""

from __future__ import annotations

import base64
import copy
import re
import signal
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from spotfit.host import env, system
from spotfit.model.offer import Market
from spotfit_localsim.clouds import kubernetes_requests
from spotfit_localsim.clouds.api import ClientAccess
from spotfit_localsim.clouds.cloud_host import OUT_OF_MEMORY, Datacenter, SimulatedMachine
from spotfit_localsim.clouds.http_server import MalformedRequestError, WireRequest, WireResponse
from spotfit_localsim.clouds.injected_errors import ApiFaults

_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
_JOB_LABEL = "batch.kubernetes.io/job-name"
_KINDS: Mapping[str, tuple[str, str]] = {
    "jobs": ("batch/v1", "Job"),
    "pods": ("v1", "Pod"),
    "secrets": ("v1", "Secret"),
    "services": ("v1", "Service"),
    "nodes": ("v1", "Node"),
    "events": ("v1", "Event"),
}
_PREEXISTING_KINDS: Mapping[str, tuple[str, str]] = {
    "namespaces": ("v1", "Namespace"),
    "serviceaccounts": ("v1", "ServiceAccount"),
    "priorityclasses": ("scheduling.k8s.io/v1", "PriorityClass"),
}
_CREATABLE_KINDS = ("jobs", "pods", "secrets", "services")
_NODE_LABELS: Mapping[Market, Mapping[str, str]] = {
    Market.SPOT: {
        "eks.amazonaws.com/capacityType": "SPOT",
        "karpenter.sh/capacity-type": "spot",
        "cloud.google.com/gke-spot": "true",
        "kubernetes.azure.com/scalesetpriority": "spot",
    },
    # On-demand nodes of GKE and AKS have no such label.
    Market.ON_DEMAND: {
        "eks.amazonaws.com/capacityType": "ON_DEMAND",
        "karpenter.sh/capacity-type": "on-demand",
    },
}
"""Labels of the nodes of each market, of all platforms at once. The nodes have every other label
that a pod requires."""
CALLER = "sim"
"""The user name of every caller."""
_NOT_READY_AFTER_S = 1.0
"""How long a node may be unresponsive before its pods become unready; 40 s or more in a real
cluster."""
_PATH_PATTERN = re.compile(
    r"/(?:api/v1|apis/batch/v1|apis/scheduling.k8s.io/v1)(?:/namespaces/(?P<space>[^/]+))?/(?P<kind>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)

KubernetesObject = dict[str, Any]


class KubernetesState(msgspec.Struct):
    objects: dict[str, dict[str, KubernetesObject]] = {}
    """By kind, then by namespace/name."""
    machines: dict[str, int] = {}
    """The machine of each pod, by uid."""
    created_count: int = 0
    counted_pods: dict[str, bool] = {}
    """Pods whose end the Job controller has counted, by uid."""


class KubernetesStatusError(Exception):
    """An error response: a Status of kind Failure."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
        self.reply = WireResponse.json(status, code)


def _no_resource_error() -> KubernetesStatusError:
    message = "the server could not find the requested resource"
    return KubernetesStatusError(404, "NotFound", message)


class KubernetesCloud:
    """One cluster in which every pod has a node of its own."""

    State: ClassVar = KubernetesState

    def __init__(self, datacenter: Datacenter, faults: ApiFaults) -> None:
        self.datacenter = datacenter
        self.faults = faults
        self.state = KubernetesState({kind: {} for kind in _KINDS})
        self.preexisting: dict[str, set[str]] = {
            "namespaces": {"default"},
            "serviceaccounts": {"default"},
            "priorityclasses": set(),
        }
        """Objects that exist without being created through this API."""
        self.restricted_namespaces: set[str] = set()
        """Namespaces with the label `pod-security.kubernetes.io/enforce: restricted`."""

    @staticmethod
    def client_access(url: str) -> ClientAccess:
        options = {
            "server": url,
            "image": "spotfit/worker:sim",
            "grace_s": 4.0,
            "flavour": "karpenter",
        }
        return ClientAccess(options, {env.KUBERNETES_API.name: url})

    # --- requests ----------------------------------------------------------------------------

    def answer_request(self, request: WireRequest) -> WireResponse:
        try:
            self._raise_fault()
            _check_media_type(request)
            if request.path in _DISCOVERY:
                return WireResponse.json(_DISCOVERY[request.path])
            # Both for the caller and, with a permission of its own, for another user.
            if request.path.endswith("subjectaccessreviews"):
                return self._review_access(request)
            return self._answer_resource(request)
        except MalformedRequestError as malformed:
            return KubernetesStatusError(400, "BadRequest", str(malformed)).reply
        except kubernetes_requests.InvalidObjectError as invalid:
            return KubernetesStatusError(invalid.code, invalid.reason, str(invalid)).reply
        except KubernetesStatusError as refused:
            return refused.reply

    def is_lagging_read(self, request: WireRequest) -> bool:
        # The API server shows every completed write; controllers and kubelets follow with a delay:
        # https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
        return request.method == "GET" and request.path.endswith("/pods")

    def _raise_fault(self) -> None:
        if self.faults.take("throttled"):
            raise KubernetesStatusError(
                429, "TooManyRequests", "too many requests, please try again later"
            )
        if self.faults.take("credentials"):
            raise KubernetesStatusError(401, "Unauthorized", "Unauthorized")

    def _review_access(self, request: WireRequest) -> WireResponse:
        """Answer whether the caller, or the named user, has the permission: all but denied ones."""
        review = request.json()
        is_own = "self" in request.path
        if not is_own:
            self._check_permission("create subjectaccessreviews")
        kind = "SelfSubjectAccessReview" if is_own else "SubjectAccessReview"
        kubernetes_requests.check_review(kind, review)
        attributes = review["spec"].get("resourceAttributes") or {}
        part = attributes.get("subresource")
        resource = attributes.get("resource", "")
        permission = f"{attributes.get('verb', '')} {resource}{f'/{part}' if part else ''}"
        # The full name is system:serviceaccount:<namespace>:<name>.
        user = (review["spec"].get("user") or "").rpartition(":")[2] or CALLER
        allowed = not self.faults.is_denied(permission, user)
        head = {"apiVersion": "authorization.k8s.io/v1", "kind": kind}
        return WireResponse.json({**head, **review, "status": {"allowed": allowed}}, 201)

    def _check_permission(self, permission: str) -> None:
        if self.faults.is_denied(permission, CALLER):
            verb, _, resource = permission.partition(" ")
            raise KubernetesStatusError(
                403,
                "Forbidden",
                f'{resource} is forbidden: User "{CALLER}" cannot {verb} resource "{resource}"',
            )

    def _answer_resource(self, request: WireRequest) -> WireResponse:
        match = _PATH_PATTERN.fullmatch(request.path)
        if match is None or match["kind"] not in {**_KINDS, **_PREEXISTING_KINDS}:
            raise _no_resource_error()
        kind, name, space = match["kind"], match["name"], match["space"] or "default"
        part = f"/{match['sub']}" if match["sub"] else ""
        verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
        reading_verb = "list" if name is None else "get"
        self._check_permission(f"{verbs.get(request.method, reading_verb)} {kind}{part}")
        if kind in self.preexisting:
            return WireResponse.json(self._find_preexisting(kind, name))
        if request.method == "POST":
            if name is not None or kind not in _CREATABLE_KINDS:
                raise KubernetesStatusError(
                    405, "MethodNotAllowed", "the server does not allow this method"
                )
            return self._answer_creation(request, kind, space)
        if name is None:
            return WireResponse.json(self._list(kind, match["space"], request.query))
        item = self._find(kind, space, name)
        if (kind, match["sub"]) == ("pods", "log"):
            # Without the parameter the whole log is returned.
            tail_lines = request.integer("tailLines", 1_000_000)
            lines = self._read_log(item).splitlines(keepends=True)[-tail_lines:]
            return WireResponse(200, "".join(lines).encode(), {"content-type": "text/plain"})
        if match["sub"] not in (None, "status"):
            raise _no_resource_error()
        if request.method == "DELETE":
            return WireResponse.json(self._delete(kind, item))
        if request.method == "PATCH":
            self._patch(kind, item, request.json())
        return WireResponse.json(item)

    def _find_preexisting(self, kind: str, name: str | None) -> KubernetesObject:
        if name not in self.preexisting[kind]:
            raise KubernetesStatusError(404, "NotFound", f'{kind} "{name}" not found')
        version, name_of_kind = _PREEXISTING_KINDS[kind]
        return {"apiVersion": version, "kind": name_of_kind, "metadata": {"name": name}}

    def _answer_creation(self, request: WireRequest, kind: str, space: str) -> WireResponse:
        body = request.json()
        is_strict = request.query.get("fieldValidation") == "Strict"
        kubernetes_requests.check_object(kind, _KINDS[kind][1], body, is_strict=is_strict)
        is_dry_run = request.query.get("dryRun") == "All"
        return WireResponse.json(self._create(kind, space, body, persist=not is_dry_run), 201)

    def _patch(self, kind: str, item: KubernetesObject, change: KubernetesObject) -> None:
        """Apply a merge patch, unless its result is invalid."""
        changed = copy.deepcopy(item)
        _merge_patch(changed, change)
        old, new = item["metadata"], changed.get("metadata")
        is_same = isinstance(new, dict) and all(
            new.get(field) == old.get(field) for field in ("name", "namespace", "uid")
        )
        if not is_same or kind not in _CREATABLE_KINDS:
            raise KubernetesStatusError(
                422, "Invalid", f'{kind} "{old["name"]}" is invalid: immutable field'
            )
        kubernetes_requests.check_object(kind, _KINDS[kind][1], changed, is_strict=False)
        item.clear()
        item |= changed

    def _create(
        self, kind: str, space: str, body: KubernetesObject, *, persist: bool = True
    ) -> KubernetesObject:
        if kind == "jobs":
            self._admit(body)
        name = body["metadata"]["name"]
        # As in a real cluster, the standard is enforced for pods, not for Jobs.
        if kind == "pods" and space in self.restricted_namespaces:
            _enforce_restricted(name, body["spec"])
        # After the admission: an invalid object is refused although its name is taken.
        if f"{space}/{name}" in self.state.objects[kind]:
            raise KubernetesStatusError(409, "AlreadyExists", f'{kind} "{name}" already exists')
        if kind == "secrets":
            # `stringData` is write-only: it is stored and returned as `data`.
            texts = body.pop("stringData", {}).items()
            encoded = {key: base64.b64encode(text.encode()).decode() for key, text in texts}
            body["data"] = encoded | body.get("data", {})
        # The status belongs to the controllers: that of a request is ignored.
        if kind == "jobs":
            body["status"] = {}
        if kind == "pods":
            body["status"] = {"phase": "Pending", "conditions": []}
        # A dry run validates and returns the object, as `kubectl --dry-run=server` does.
        if not persist:
            return body
        return self._store_object(kind, space, body)

    def _admit(self, body: KubernetesObject) -> None:
        if self.faults.take("permission"):
            user = "system:serviceaccount:default:x"
            raise KubernetesStatusError(
                403,
                "Forbidden",
                f'jobs.batch is forbidden: User "{user}" cannot create resource "jobs"',
            )
        # The message of the quota admission controller; clients find the quota by its text.
        if self.faults.take("quota"):
            name = body["metadata"]["name"]
            raise KubernetesStatusError(
                403,
                "Forbidden",
                f'jobs.batch "{name}" is forbidden: exceeded quota: compute, requested: '
                "count/jobs.batch=1, used: count/jobs.batch=4, limited: count/jobs.batch=4",
            )

    def _store_object(self, kind: str, space: str, body: KubernetesObject) -> KubernetesObject:
        # Versions only have to grow; clients compare them for equality.
        self.state.created_count += 1
        version, name_of_kind = _KINDS[kind]
        meta = body.setdefault("metadata", {})
        meta |= {
            "namespace": space,
            "uid": str(uuid.uuid4()),
            "resourceVersion": str(self.state.created_count),
            "creationTimestamp": _now_text(),
        }
        stored = {"apiVersion": version, "kind": name_of_kind, **body}
        self.state.objects[kind][f"{space}/{meta['name']}"] = stored
        return stored

    def _list(self, kind: str, space: str | None, query: Mapping[str, str]) -> KubernetesObject:
        labels = _parse_selector(query.get("labelSelector", ""))
        fields = _parse_selector(query.get("fieldSelector", ""))
        version, name_of_kind = _KINDS[kind]
        items = [
            one
            for one in self._objects(kind)
            if space in (None, one["metadata"].get("namespace"))
            and labels.items() <= one["metadata"].get("labels", {}).items()
            and all(_read_field(one, path) == value for path, value in fields.items())
        ]
        return {
            "apiVersion": version,
            "kind": f"{name_of_kind}List",
            "metadata": {"resourceVersion": str(self.state.created_count)},
            "items": items,
        }

    def _find(self, kind: str, space: str, name: str) -> KubernetesObject:
        for one in self._objects(kind):
            meta = one["metadata"]
            # Nodes have no namespace.
            if meta["name"] == name and meta.get("namespace", space) == space:
                return one
        raise KubernetesStatusError(404, "NotFound", f'{kind} "{name}" not found')

    def _delete(self, kind: str, item: KubernetesObject) -> KubernetesObject:
        """Delete with background propagation: the Job at once, its pods when they have ended."""
        machine = self._find_machine(item) if kind == "pods" else None
        if machine is not None and machine.is_active:
            # The pod is listed as terminating until its container has ended.
            item["metadata"].setdefault("deletionTimestamp", _now_text())
            grace_s = item["spec"].get("terminationGracePeriodSeconds", 30)
            self.datacenter.stop(machine, grace_s=grace_s)
        else:
            self._remove_object(kind, item)
        # The garbage collector deletes what the deleted object owns.
        for owned_kind in ("pods", "secrets", "services"):
            for owned in self._objects(owned_kind):
                if _is_owned(owned, item["metadata"]["uid"]):
                    self._delete(owned_kind, owned)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {}}

    def _remove_object(self, kind: str, item: KubernetesObject) -> None:
        meta = item["metadata"]
        self.state.objects[kind].pop(f"{meta['namespace']}/{meta['name']}", None)

    def _read_log(self, pod: KubernetesObject) -> str:
        """Return the log from the node, without delay; it is lost with the pod."""
        machine = self._find_machine(pod)
        # As the kubelet answers before it has started the container.
        if machine is None or machine.state == "booting":
            name = f'"{pod["spec"]["containers"][0]["name"]}" in pod "{pod["metadata"]["name"]}"'
            raise KubernetesStatusError(
                400, "BadRequest", f"container {name} is waiting to start: ContainerCreating"
            )
        return self.datacenter.output(machine)

    def _objects(self, kind: str) -> list[KubernetesObject]:
        if kind == "nodes":
            return [_render_node(machine) for machine in self.datacenter.active_machines()]
        return list(self.state.objects.get(kind, {}).values())

    def _find_machine(self, pod: KubernetesObject) -> SimulatedMachine | None:
        number = self.state.machines.get(pod["metadata"]["uid"])
        return self.datacenter.machines.get(number) if number is not None else None

    # --- the controllers, the scheduler and the kubelets ---------------------------------------

    def tick(self) -> None:
        for pod in self._objects("pods"):
            self._reconcile_pod(pod)
        for job in self._objects("jobs"):
            if not job["spec"].get("suspend"):
                self._reconcile_job(job)

    def _reconcile_job(self, job: KubernetesObject) -> None:
        """Create a pod for each index that has none and has not ended."""
        status = job.setdefault("status", {})
        completions = job["spec"].get("completions", 1)
        # With the ended ones: they count as failures and make the names of retries unique.
        pods: dict[int, list[KubernetesObject]] = {}
        for pod in self._pods_of(job):
            pods.setdefault(_index(pod), []).append(pod)
        active = 0
        for index in range(completions):
            own = pods.get(index, [])
            running = [pod for pod in own if pod["status"]["phase"] in ("Pending", "Running")]
            active += len(running)
            self._count_ended_pods(job, index, [pod for pod in own if pod not in running])
            # The other indexes wait for the end of a running pod.
            has_slot = active < job["spec"].get("parallelism", 1)
            if not running and has_slot and index not in _ended_indexes(status):
                if self.faults.is_active("pod_quota"):
                    self._record_quota_event(job)
                else:
                    # The number of earlier pods makes the name of a retry unique.
                    self._create_pod(job, index, len(own))
                    active += 1
        status["active"] = active
        # A finished Job keeps its condition.
        if len(_ended_indexes(status)) == completions and "conditions" not in status:
            failed = bool(status.get("failedIndexes"))
            kind = "Failed" if failed else "Complete"
            status["conditions"] = [
                {"type": kind, "status": "True", "lastTransitionTime": _now_text()}
            ]

    def _count_ended_pods(
        self, job: KubernetesObject, index: int, pods: list[KubernetesObject]
    ) -> None:
        """Count each end once, as by the finalizer of the Job controller."""
        for pod in pods:
            if pod["metadata"]["uid"] not in self.state.counted_pods:
                self.state.counted_pods[pod["metadata"]["uid"]] = True
                self._record_pod_end(job, job["status"], index, pod)

    def _record_pod_end(
        self, job: KubernetesObject, status: KubernetesObject, index: int, pod: KubernetesObject
    ) -> None:
        if pod["status"]["phase"] == "Succeeded":
            _add_index(status, "completedIndexes", index)
            return
        rules = job["spec"].get("podFailurePolicy", {}).get("rules", [])
        # The first rule that matches decides; without one the failure counts.
        action = next((rule["action"] for rule in rules if _rule_matches(rule, pod)), "Count")
        # The failure does not count, and the index gets another pod.
        if action == "Ignore":
            return
        # Without a limit an index is retried indefinitely: `backoffLimit` is not simulated.
        limit = job["spec"].get("backoffLimitPerIndex")
        failures = sum(
            one["status"]["phase"] == "Failed" and _index(one) == index
            for one in self._pods_of(job)
        )
        if action in ("FailIndex", "FailJob") or (limit is not None and failures > limit):
            _add_index(status, "failedIndexes", index)

    def _record_quota_event(self, job: KubernetesObject) -> None:
        """Record FailedCreate, as the Job controller does while it retries: one event per Job."""
        meta = job["metadata"]
        name = f"{meta['name']}.failed-create"
        known = self.state.objects["events"].get(f"{meta['namespace']}/{name}")
        # The real controller counts repetitions in one event.
        if known is not None:
            return
        event = {
            "metadata": {"name": name},
            "involvedObject": {
                "kind": "Job",
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
                "apiVersion": "batch/v1",
            },
            "type": "Warning",
            "reason": "FailedCreate",
            "message": f'Error creating: pods "{meta["name"]}-0-x" is forbidden: exceeded quota: '
            "compute, requested: pods=1, used: pods=4, limited: pods=4",
            "source": {"component": "job-controller"},
            "firstTimestamp": _now_text(),
            "lastTimestamp": _now_text(),
            "count": 1,
        }
        self._store_object("events", meta["namespace"], event)

    def _create_pod(self, job: KubernetesObject, index: int, attempts: int) -> None:
        name = job["metadata"]["name"]
        template = job["spec"]["template"]
        template_meta = template.get("metadata", {})
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        job_labels = {_INDEX_LABEL: str(index), _JOB_LABEL: name}
        pod = {
            "metadata": {
                "name": f"{name}-{index}-{attempts:x}{uuid.uuid4().hex[:4]}",
                "labels": {**template_meta.get("labels", {}), **job_labels},
                "annotations": {
                    **template_meta.get("annotations", {}),
                    _INDEX_LABEL: str(index),
                },
                "ownerReferences": [owner],
            },
            # Stable names by index: agents of an indexed Job find each other by DNS.
            "spec": {**template["spec"], "hostname": f"{name}-{index}"},
            "status": {"phase": "Pending", "conditions": []},
        }
        self._store_object("pods", job["metadata"]["namespace"], pod)

    def _pods_of(self, job: KubernetesObject) -> list[KubernetesObject]:
        return [pod for pod in self._objects("pods") if _is_owned(pod, job["metadata"]["uid"])]

    def _reconcile_pod(self, pod: KubernetesObject) -> None:
        status, machine = pod["status"], self._find_machine(pod)
        if machine is None:
            self._schedule_pod(pod)
        elif not machine.is_active:
            self._record_container_end(pod, machine)
        elif machine.state == "up" and status["phase"] == "Pending":
            # The IP address is known only when the pod is scheduled and started.
            status |= {
                "phase": "Running",
                "podIP": self.datacenter.host(machine),
                "startTime": _time_text(machine.started_at_s or _now_s()),
            }
            _set_ready_condition(status, "True")
            pod["spec"]["nodeName"] = _node_name(machine)
        elif (
            machine.silent_since_s is not None
            # The node controller waits for missed heartbeats of the kubelet.
            and _now_s() >= machine.silent_since_s + _NOT_READY_AFTER_S
        ):
            _set_ready_condition(status, "False")
        elif machine.noticed_at_s is not None and "deletionTimestamp" not in pod["metadata"]:
            # A terminating node is tainted; then its pods are deleted: SIGTERM, and their grace.
            # Half of the notice is over then: a real node drain takes some time, too.
            assert machine.kill_due_s is not None
            if _now_s() < (machine.noticed_at_s + machine.kill_due_s) / 2:
                return
            pod["metadata"]["deletionTimestamp"] = _now_text()
            _add_disruption_condition(
                status, "DeletionByTaintManager", "deleting due to NoExecute taint"
            )
            self.datacenter.send_signal(machine, signal.SIGTERM)

    def _schedule_pod(self, pod: KubernetesObject) -> None:
        # A deleted or ended pod is not scheduled again.
        if "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] != "Pending":
            return
        container = pod["spec"]["containers"][0]
        if missing := self._find_missing_secret(pod):
            # A kubelet reports this of a pod that has a node, and retries.
            waiting = {
                "reason": "CreateContainerConfigError",
                "message": f'secret "{missing}" not found',
            }
            status = _container_status(container, {"waiting": waiting})
            pod["status"]["containerStatuses"] = [status]
            return
        pod["status"].pop("containerStatuses", None)
        machine = None if self.faults.is_active("capacity") else self._rent_machine(pod)
        unschedulable = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient cpu.",
        }
        scheduled = {"type": "PodScheduled", "status": "True"}
        # Clients show why a pod is pending from this condition.
        pod["status"]["conditions"] = [scheduled if machine else unschedulable]
        if machine is not None:
            self.state.machines[pod["metadata"]["uid"]] = machine.number

    def _find_missing_secret(self, pod: KubernetesObject) -> str:
        secrets, space = self.state.objects["secrets"], pod["metadata"]["namespace"]
        references = [one["secretRef"] for one in pod["spec"]["containers"][0].get("envFrom", [])]
        required = (one["name"] for one in references if not one.get("optional"))
        return next((name for name in required if f"{space}/{name}" not in secrets), "")

    def _rent_machine(self, pod: KubernetesObject) -> SimulatedMachine | None:
        container = pod["spec"]["containers"][0]
        limits = container.get("resources", {}).get("limits", {})
        memory = limits.get("memory")
        market = _find_market(pod["spec"])
        if market is None:
            return None
        # The environment is built when the machine boots, from the pod as it is then.
        return self.datacenter.rent(
            pod["metadata"]["name"],
            container["command"] + container.get("args", []),
            {},
            market=market,
            memory_limit_mib=None if memory is None else _quantity_mib(memory),
            gpus=int(kubernetes_requests.parse_quantity(limits.get("nvidia.com/gpu", "0"))),
        )

    def _record_container_end(self, pod: KubernetesObject, machine: SimulatedMachine) -> None:
        status = pod["status"]
        if status["phase"] in ("Succeeded", "Failed"):
            owners = {one["uid"] for one in pod["metadata"].get("ownerReferences", [])}
            has_job = any(job["metadata"]["uid"] in owners for job in self._objects("jobs"))
            # The finalizer of the Job controller keeps a pod until its end is counted.
            if "deletionTimestamp" in pod["metadata"] and not has_job:
                self._remove_object("pods", pod)
            return
        # 128 + SIGKILL: the container was killed with its node or after the grace period.
        code = 137 if machine.exit_code is None else machine.exit_code
        status["phase"] = "Succeeded" if code == 0 else "Failed"
        # Since Kubernetes 1.28, all processes of the container are killed (memory.oom.group).
        is_out_of_memory = machine.end_reason == OUT_OF_MEMORY
        reason = "OOMKilled" if is_out_of_memory else "Error" if code else "Completed"
        terminated = {"exitCode": code, "reason": reason}
        terminated["finishedAt"] = _time_text(machine.ended_at_s or _now_s())
        container = pod["spec"]["containers"][0]
        status["containerStatuses"] = [_container_status(container, {"terminated": terminated})]
        # The node is gone: PodGC marks its pods, which the Job controller then replaces.
        if machine.exit_code is None and machine.end_reason != "stopped":
            _add_disruption_condition(status, "DeletionByPodGC", "PodGC: node no longer exists")

    # --- on a machine ------------------------------------------------------------------------

    def task_environment(self, machine: SimulatedMachine) -> Mapping[str, str]:
        pods = (one for one in self._objects("pods") if one["metadata"]["name"] == machine.task)
        pod = next(pods, None)
        if pod is None:
            return {}
        container = pod["spec"]["containers"][0]
        # An empty host: clients in the pod must not look for a real cluster.
        variables = {"KUBERNETES_SERVICE_HOST": ""}
        if _INDEX_LABEL in pod["metadata"].get("labels", {}):
            variables["JOB_COMPLETION_INDEX"] = str(_index(pod))
        for source in container.get("envFrom", []):
            key = f"{pod['metadata']['namespace']}/{source['secretRef']['name']}"
            # A Secret that was deleted since the pod was scheduled has no variables.
            secret = self.state.objects["secrets"].get(key, {}).get("data", {})
            variables |= {name: base64.b64decode(text).decode() for name, text in secret.items()}
        meta, address = pod["metadata"], self.datacenter.host(machine)
        fields = {
            "metadata.name": meta["name"],
            "metadata.namespace": meta["namespace"],
            "metadata.uid": meta["uid"],
            "spec.nodeName": _node_name(machine),
            "status.hostIP": address,
            "status.podIP": address,
        }
        for variable in container.get("env", []):
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[variable["name"]] = fields[field] if field else variable.get("value", "")
        return variables

    def answer_metadata(
        self, machine: SimulatedMachine, request: WireRequest
    ) -> WireResponse | None:
        return None


def _find_market(pod: Mapping[str, Any]) -> Market | None:
    """Return the market of the nodes on which the pod is placed: spot, unless it avoids them.

    None if the pod fits no node.
    """
    affinity = ((pod.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    # One of the terms has to match, with all its expressions.
    terms = affinity.get("nodeSelectorTerms") or [{}]
    for market, labels in _NODE_LABELS.items():
        is_selected = all(
            labels.get(name) == value
            for name, value in (pod.get("nodeSelector") or {}).items()
            if name in _CAPACITY_LABELS
        )
        if is_selected and any(
            all(_matches(one, labels) for one in term.get("matchExpressions") or [])
            for term in terms
        ):
            return market
    return None


_CAPACITY_LABELS = frozenset(name for labels in _NODE_LABELS.values() for name in labels)


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#operators."""
    if expression["key"] not in _CAPACITY_LABELS:
        return True
    value, operator = labels.get(expression["key"]), str(expression["operator"])
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    values: list[str] = expression["values"]
    return (value in values) == (operator == "In")


def _rule_matches(rule: Mapping[str, Any], pod: KubernetesObject) -> bool:
    # Preemptions are recognized by the condition DisruptionTarget, not by an exit code.
    if "onPodConditions" in rule:
        expected = {(one["type"], one.get("status", "True")) for one in rule["onPodConditions"]}
        actual = {(one["type"], one["status"]) for one in pod["status"].get("conditions", [])}
        return bool(expected & actual)
    rule_codes = rule["onExitCodes"]
    codes = [
        one["state"]["terminated"]["exitCode"] for one in pod["status"].get("containerStatuses", [])
    ]
    if rule_codes["operator"] == "In":
        return any(code in rule_codes["values"] for code in codes)
    # The operator NotIn ignores code 0, as documented.
    return any(code not in rule_codes["values"] for code in codes if code != 0)


def _quantity_mib(text: str) -> int:
    """Parse a quantity of memory such as '2048Mi', '2Gi', '2G' or '2147483648'."""
    return int(kubernetes_requests.parse_quantity(text) / 2**20)


def _add_disruption_condition(status: KubernetesObject, reason: str, message: str) -> None:
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": _now_text(),
    }
    conditions = status.setdefault("conditions", [])
    if not any(one["type"] == "DisruptionTarget" for one in conditions):
        conditions.append(condition)


def _container_status(container: KubernetesObject, state: KubernetesObject) -> KubernetesObject:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": container["image"],
        "ready": False,
        "restartCount": 0,
        "state": state,
    }


def _set_ready_condition(status: KubernetesObject, value: str) -> None:
    # There is one condition of each type.
    others = [one for one in status.get("conditions", []) if one["type"] != "Ready"]
    status["conditions"] = [*others, {"type": "Ready", "status": value}]


def _parse_selector(text: str) -> dict[str, str]:
    """Parse 'name=value,…'; other operators are not simulated."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if any(not equals or name.endswith("!") for name, equals, _ in pairs):
        raise KubernetesStatusError(400, "BadRequest", f"unable to parse requirement: {text!r}")
    # '=' and '==' are equal.
    return {name: value.removeprefix("=") for name, _, value in pairs}


def _check_media_type(request: WireRequest) -> None:
    """Refuse other formats than JSON, as an API server does which does not know the format.

    The message is that of NewUnsupportedMediaTypeError:
    https://github.com/kubernetes/apiserver/blob/master/pkg/endpoints/handlers/negotiation/errors.go
    Real API servers also know YAML and protobuf, which `kubectl auth can-i` sends.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if request.body and "json" not in media_type and media_type:
        raise KubernetesStatusError(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: "
            "application/json",
        )


def _read_field(one: KubernetesObject, path: str) -> Any:
    """Return the value at a path such as 'involvedObject.name'."""
    for name in path.split("."):
        one = one.get(name, {})
    return one


def _is_owned(one: KubernetesObject, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", []))


def _index(pod: KubernetesObject) -> int:
    return int(pod["metadata"]["labels"][_INDEX_LABEL])


def _parse_indexes(text: str | None) -> set[int]:
    return {int(part) for part in filter(None, (text or "").split(","))}


def _ended_indexes(status: KubernetesObject) -> set[int]:
    completed, failed = status.get("completedIndexes"), status.get("failedIndexes")
    return _parse_indexes(completed) | _parse_indexes(failed)


def _add_index(status: KubernetesObject, name: str, index: int) -> None:
    status[name] = ",".join(str(one) for one in sorted(_parse_indexes(status.get(name)) | {index}))


def _merge_patch(into: KubernetesObject, change: KubernetesObject) -> None:
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            # RFC 7396
            _merge_patch(into[name], value)
        elif value is None:
            into.pop(name, None)
        else:
            into[name] = value


def _node_name(machine: SimulatedMachine) -> str:
    return f"{machine.market.value.replace('_', '-')}-{machine.number}"


def _render_node(machine: SimulatedMachine) -> KubernetesObject:
    """Render a node, with the taints of the AWS termination handler after a notice or
    recommendation."""
    notices = {"spot-itn": machine.noticed_at_s, "rebalance-recommendation": machine.advised_at_s}
    taints = [
        {"key": f"aws-node-termination-handler/{taint}", "effect": "NoSchedule"}
        for taint, since in notices.items()
        if since is not None
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": _node_name(machine),
            "uid": _node_name(machine),
            "labels": dict(_NODE_LABELS[machine.market]),
        },
        "spec": {"taints": taints} if taints else {},
    }


def _now_s() -> float:
    return system.wall_ms() / 1000


def _now_text() -> str:
    return _time_text(_now_s())


def _time_text(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _render_api_resources(version: str) -> KubernetesObject:
    """Return the discovery document that kubectl requests first."""
    short_names = {
        "jobs": [],
        "pods": ["po"],
        "services": ["svc"],
        "secrets": [],
        "nodes": ["no"],
        "events": ["ev"],
    }
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [
            {
                "name": kind,
                "singularName": name.lower(),
                "namespaced": kind != "nodes",
                "kind": name,
                "shortNames": short_names[kind],
                "verbs": ["create", "delete", "get", "list", "patch"],
            }
            for kind, (its_version, name) in _KINDS.items()
            if its_version == version
        ],
    }


_BATCH = {"groupVersion": "batch/v1", "version": "v1"}
_DISCOVERY: Mapping[str, KubernetesObject] = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0-simulated"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "batch", "versions": [_BATCH], "preferredVersion": _BATCH}],
    },
    "/api/v1": _render_api_resources("v1"),
    "/apis/batch/v1": _render_api_resources("batch/v1"),
}


def _enforce_restricted(name: str, pod: Mapping[str, Any]) -> None:
    """Raise the error of Pod Security Admission for pods that are not 'restricted'.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
    """
    context = pod.get("securityContext") or {}
    contexts = [container.get("securityContext") or {} for container in pod["containers"]]
    added = {
        capability
        for one in contexts
        for capability in (one.get("capabilities") or {}).get("add") or []
    }
    violations = {
        "host namespaces": any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")),
        "hostPath volumes": any("hostPath" in volume for volume in pod.get("volumes") or []),
        "privileged": any(one.get("privileged") for one in contexts),
        "allowPrivilegeEscalation != false": any(
            one.get("allowPrivilegeEscalation") is not False for one in contexts
        ),
        "unrestricted capabilities": not added <= {"NET_BIND_SERVICE"}
        or any(
            "ALL" not in ((one.get("capabilities") or {}).get("drop") or []) for one in contexts
        ),
        "runAsNonRoot != true": any(
            one.get("runAsNonRoot", context.get("runAsNonRoot")) is not True for one in contexts
        ),
        "seccompProfile": any(
            (one.get("seccompProfile") or context.get("seccompProfile") or {}).get("type")
            not in ("RuntimeDefault", "Localhost")
            for one in contexts
        ),
    }
    if found := [what for what, is_violated in violations.items() if is_violated]:
        raise KubernetesStatusError(
            403,
            "Forbidden",
            f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": '
            f"{', '.join(found)}",
        )
