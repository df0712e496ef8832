"""The slice of a Kubernetes API server that groups need, for the real client and for kubectl.

Jobs (indexed, with pod failure policies), pods, their logs, Secrets, Services, nodes, and reviews
of rights. Behaviour as documented:
https://kubernetes.io/docs/concepts/workloads/controllers/job/ and
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions.
"""

from __future__ import annotations

import base64
import re
import signal
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from spotfit.host import clocks, env
from spotfit_localsim.wire.api import Access
from spotfit_localsim.wire.http import Reply, Request
from spotfit_localsim.wire.site import Machine, Site
from spotfit_localsim.wire.trouble import Troubles

_INDEX = "batch.kubernetes.io/job-completion-index"
_JOB = "batch.kubernetes.io/job-name"
_KINDS: Mapping[str, tuple[str, str]] = {
    "jobs": ("batch/v1", "Job"),
    "pods": ("v1", "Pod"),
    "secrets": ("v1", "Secret"),
    "services": ("v1", "Service"),
    "nodes": ("v1", "Node"),
    "events": ("v1", "Event"),
}
_GIVEN: Mapping[str, tuple[str, str]] = {
    "namespaces": ("v1", "Namespace"),
    "serviceaccounts": ("v1", "ServiceAccount"),
    "priorityclasses": ("scheduling.k8s.io/v1", "PriorityClass"),
}
CALLER = "sim"
"""The user that asks, whatever its credentials are."""
_SILENT_AFTER_S = 1.0
"""How long a node may be silent before its pods are called unready: in truth 40 s or more."""
_PATH = re.compile(
    r"/(?:api/v1|apis/batch/v1|apis/scheduling.k8s.io/v1)(?:/namespaces/(?P<space>[^/]+))?/(?P<kind>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)

Body = dict[str, Any]


class Memory(msgspec.Struct):
    objects: dict[str, dict[str, Body]] = {}
    """By kind, then by namespace/name."""
    machines: dict[str, int] = {}
    """Which machine each pod has."""
    created: int = 0


class StatusError(Exception):
    """An answer that is a Status of kind Failure."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        told = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
        self.reply = Reply.json(told, code)


class KubernetesCloud:
    """One cluster whose every pod gets a node of its own."""

    Memory: ClassVar = Memory

    def __init__(self, site: Site, troubles: Troubles) -> None:
        self.site = site
        self.troubles = troubles
        self.memory = Memory({kind: {} for kind in _KINDS})
        self.given: dict[str, set[str]] = {
            "namespaces": {"default"},
            "serviceaccounts": {"default"},
            "priorityclasses": set(),
        }
        """What there is that nobody makes here."""

    @staticmethod
    def access(url: str) -> Access:
        options = {"server": url, "image": "spotfit/worker:sim", "grace_s": 4.0}
        return Access(options, {env.KUBERNETES_API.name: url})

    # --- requests ----------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        try:
            self._refuse()
            if request.path in _DISCOVERY:
                return Reply.json(_DISCOVERY[request.path])
            if request.path.endswith("subjectaccessreviews"):
                return self._review(request)
            return self._resource(request)
        except StatusError as refused:
            return refused.reply

    def _refuse(self) -> None:
        if self.troubles.strikes("throttled"):
            raise StatusError(429, "TooManyRequests", "too many requests, please try again later")
        if self.troubles.strikes("credentials"):
            raise StatusError(401, "Unauthorized", "Unauthorized")

    def _review(self, request: Request) -> Reply:
        """Whether we, or whoever is named, may do that: all that nobody has forbidden."""
        told = request.json()
        if told["kind"] == "SubjectAccessReview":
            self._check("create subjectaccessreviews")
        asked = told["spec"]["resourceAttributes"]
        part = asked.get("subresource")
        right = f"{asked['verb']} {asked['resource']}{f'/{part}' if part else ''}"
        who = told["spec"].get("user", "").rpartition(":")[2] or CALLER
        allowed = not self.troubles.forbids(right, who)
        return Reply.json({**told, "status": {"allowed": allowed}}, 201)

    def _check(self, right: str) -> None:
        if self.troubles.forbids(right, CALLER):
            verb, _, resource = right.partition(" ")
            raise StatusError(
                403,
                "Forbidden",
                f'{resource} is forbidden: User "{CALLER}" cannot {verb} resource "{resource}"',
            )

    def _resource(self, request: Request) -> Reply:
        match = _PATH.fullmatch(request.path)
        if match is None or match["kind"] not in {**_KINDS, **_GIVEN}:
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        kind, name, space = match["kind"], match["name"], match["space"] or "default"
        part = f"/{match['sub']}" if match["sub"] else ""
        self._check(f"{_verb(request.method, name)} {kind}{part}")
        if kind in self.given:
            return Reply.json(self._given(kind, name))
        if request.method == "POST":
            dry = request.query.get("dryRun") == "All"
            return Reply.json(self._create(kind, space, request.json(), keep=not dry), 201)
        if name is None:
            return Reply.json(self._list(kind, match["space"], request.query))
        found = self._find(kind, space, name)
        if match["sub"] == "log":
            last = int(request.query.get("tailLines", 1_000_000))
            lines = self._log(found).splitlines(keepends=True)[-last:]
            return Reply(200, "".join(lines).encode(), {"content-type": "text/plain"})
        if request.method == "DELETE":
            return Reply.json(self._delete(kind, found))
        if request.method == "PATCH":
            _merge(found, request.json())
        return Reply.json(found)

    def _given(self, kind: str, name: str | None) -> Body:
        """What nobody here makes: it is there, or it is not."""
        version, name_of_kind = _GIVEN[kind]
        if name not in self.given[kind]:
            raise StatusError(404, "NotFound", f'{kind} "{name}" not found')
        return {"apiVersion": version, "kind": name_of_kind, "metadata": {"name": name}}

    def _create(self, kind: str, space: str, body: Body, *, keep: bool = True) -> Body:
        if kind == "jobs":
            self._admit(body)
        name = body["metadata"]["name"]
        if f"{space}/{name}" in self.memory.objects[kind]:
            raise StatusError(409, "AlreadyExists", f'{kind} "{name}" already exists')
        if kind == "secrets":
            clear = body.pop("stringData", {})
            body["data"] = {key: _encoded(clear[key]) for key in clear} | body.get("data", {})
        if not keep:
            return body
        return self._keep(kind, space, body)

    def _admit(self, body: Body) -> None:
        if self.troubles.strikes("permission"):
            who = "system:serviceaccount:default:x"
            raise StatusError(
                403,
                "Forbidden",
                f'jobs.batch is forbidden: User "{who}" cannot create resource "jobs"',
            )
        if self.troubles.strikes("quota"):
            name = body["metadata"]["name"]
            raise StatusError(
                403,
                "Forbidden",
                f'jobs.batch "{name}" is forbidden: exceeded quota: compute, requested: '
                "count/jobs.batch=1, used: count/jobs.batch=4, limited: count/jobs.batch=4",
            )
        spec = body["spec"]
        pod = spec["template"]["spec"]
        if spec.get("podFailurePolicy") and pod.get("restartPolicy") != "Never":
            raise StatusError(422, "Invalid", "podFailurePolicy needs restartPolicy: Never")
        if spec.get("podFailurePolicy") and spec.get("podReplacementPolicy") not in (
            None,
            "Failed",
        ):
            raise StatusError(422, "Invalid", "podReplacementPolicy can only be Failed")

    def _keep(self, kind: str, space: str, body: Body) -> Body:
        self.memory.created += 1
        version, name_of_kind = _KINDS[kind]
        meta = body.setdefault("metadata", {})
        meta |= {
            "namespace": space,
            "uid": str(uuid.uuid4()),
            "resourceVersion": str(self.memory.created),
            "creationTimestamp": _now(),
        }
        kept = {"apiVersion": version, "kind": name_of_kind, **body}
        self.memory.objects[kind][f"{space}/{meta['name']}"] = kept
        return kept

    def _list(self, kind: str, space: str | None, query: Mapping[str, str]) -> Body:
        wanted = dict(
            pair.split("=", 1) for pair in query.get("labelSelector", "").split(",") if pair
        )
        fields = dict(
            pair.split("=", 1) for pair in query.get("fieldSelector", "").split(",") if pair
        )
        version, name_of_kind = _KINDS[kind]
        found = [
            one
            for one in self._objects(kind)
            if space in (None, one["metadata"].get("namespace"))
            and wanted.items() <= one["metadata"].get("labels", {}).items()
            and all(_field(one, name) == value for name, value in fields.items())
        ]
        return {
            "apiVersion": version,
            "kind": f"{name_of_kind}List",
            "metadata": {"resourceVersion": str(self.memory.created)},
            "items": found,
        }

    def _find(self, kind: str, space: str, name: str) -> Body:
        found = next((one for one in self._objects(kind) if _is_called(one, space, name)), None)
        if found is None:
            raise StatusError(404, "NotFound", f'{kind} "{name}" not found')
        return found

    def _delete(self, kind: str, found: Body) -> Body:
        """In the background: a Job is gone at once, its pods when they have ended."""
        if kind == "pods":
            self._evict(found)
        else:
            self._drop(kind, found)
        for owned_kind in ("pods", "secrets", "services"):
            for owned in self._objects(owned_kind):
                if _is_owned(owned, found["metadata"]["uid"]):
                    self._delete(owned_kind, owned)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {}}

    def _evict(self, pod: Body) -> None:
        meta = pod["metadata"]
        meta.setdefault("deletionTimestamp", _now())
        machine = self._machine(pod)
        if machine is None or not machine.standing:
            self._drop("pods", pod)
        else:
            self.site.stop(machine, grace_s=pod["spec"].get("terminationGracePeriodSeconds", 30))

    def _drop(self, kind: str, found: Body) -> None:
        meta = found["metadata"]
        self.memory.objects[kind].pop(f"{meta['namespace']}/{meta['name']}", None)

    def _log(self, pod: Body) -> str:
        """From the node, at once; with a pod its log is gone as well."""
        machine = self._machine(pod)
        if machine is None or machine.state == "booting":
            name = f'"{pod["spec"]["containers"][0]["name"]}" in pod "{pod["metadata"]["name"]}"'
            raise StatusError(
                400, "BadRequest", f"container {name} is waiting to start: ContainerCreating"
            )
        return self.site.output(machine)

    def _objects(self, kind: str) -> list[Body]:
        if kind == "nodes":
            return [_node_of(machine) for machine in self.site.standing()]
        return list(self.memory.objects.get(kind, {}).values())

    def _machine(self, pod: Body) -> Machine | None:
        number = self.memory.machines.get(pod["metadata"]["uid"])
        return self.site.machines.get(number) if number is not None else None

    # --- the controllers, the scheduler and the kubelets ---------------------------------------

    def tick(self) -> None:
        for pod in self._objects("pods"):
            self._move(pod)
        for job in self._objects("jobs"):
            if not job["spec"].get("suspend"):
                self._control(job)

    def _control(self, job: Body) -> None:
        """A pod for each index that has none and is not over."""
        status = job.setdefault("status", {})
        over = _indexes(status.get("completedIndexes")) | _indexes(status.get("failedIndexes"))
        active = 0
        for index in range(job["spec"]["completions"]):
            pods = [pod for pod in self._pods_of(job) if _index(pod) == index]
            lives = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
            active += len(lives)
            ended = [pod for pod in pods if pod not in lives and "judged" not in pod]
            for pod in ended:
                pod["judged"] = True
                self._judge(job, status, index, pod)
                over = _indexes(status.get("completedIndexes")) | _indexes(
                    status.get("failedIndexes")
                )
            if index not in over and not lives:
                if self.troubles.now("pod_quota"):
                    self._complain(job)
                else:
                    self._spawn(job, index, len(pods))
        status["active"] = active
        if len(over) == job["spec"]["completions"] and "conditions" not in status:
            failed = bool(status.get("failedIndexes"))
            kind = "Failed" if failed else "Complete"
            status["conditions"] = [{"type": kind, "status": "True", "lastTransitionTime": _now()}]

    def _judge(self, job: Body, status: Body, index: int, pod: Body) -> None:
        if pod["status"]["phase"] == "Succeeded":
            _add(status, "completedIndexes", index)
            return
        rules = job["spec"].get("podFailurePolicy", {}).get("rules", [])
        action = next((rule["action"] for rule in rules if _applies(rule, pod)), "Count")
        if action == "Ignore":
            return
        limit = job["spec"].get("backoffLimitPerIndex")
        failures = sum(
            one["status"]["phase"] == "Failed" and _index(one) == index
            for one in self._pods_of(job)
        )
        if action in ("FailIndex", "FailJob") or (limit is not None and failures > limit):
            _add(status, "failedIndexes", index)

    def _complain(self, job: Body) -> None:
        """As the Job's controller does, which tries again until there is room: one event."""
        meta = job["metadata"]
        name = f"{meta['name']}.unmade"
        known = self.memory.objects["events"].get(f"{meta['namespace']}/{name}")
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
            "firstTimestamp": _now(),
            "lastTimestamp": _now(),
            "count": 1,
        }
        self._keep("events", meta["namespace"], event)

    def _spawn(self, job: Body, index: int, tries: int) -> None:
        name = job["metadata"]["name"]
        template = job["spec"]["template"]
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        told = {_INDEX: str(index), _JOB: name}
        pod = {
            "metadata": {
                "name": f"{name}-{index}-{tries:x}{uuid.uuid4().hex[:4]}",
                "labels": {**template["metadata"].get("labels", {}), **told},
                "annotations": {_INDEX: str(index)},
                "ownerReferences": [owner],
            },
            "spec": {**template["spec"], "hostname": f"{name}-{index}"},
            "status": {"phase": "Pending", "conditions": []},
        }
        self._keep("pods", job["metadata"]["namespace"], pod)

    def _pods_of(self, job: Body) -> list[Body]:
        return [pod for pod in self._objects("pods") if _is_owned(pod, job["metadata"]["uid"])]

    def _move(self, pod: Body) -> None:
        status, machine = pod["status"], self._machine(pod)
        if machine is None:
            self._schedule(pod)
        elif not machine.standing:
            self._end(pod, machine)
        elif machine.state == "up" and status["phase"] == "Pending":
            status |= {"phase": "Running", "podIP": self.site.host(machine), "startTime": _now()}
            _ready(status, "True")
            pod["spec"]["nodeName"] = _node(machine)
        elif machine.silent_s is not None and _now_s() >= machine.silent_s + _SILENT_AFTER_S:
            _ready(status, "False")
        elif machine.notice_s is not None and "deletionTimestamp" not in pod["metadata"]:
            # A node that goes is tainted; then its pods are deleted: SIGTERM, and their grace.
            if not self._is_time_to_evict(machine):
                return
            pod["metadata"]["deletionTimestamp"] = _now()
            _disrupted(status, "DeletionByTaintManager", "deleting due to NoExecute taint")
            self.site.send(machine, signal.SIGTERM)

    def _is_time_to_evict(self, machine: Machine) -> bool:
        """Half of its notice later: whoever drains a node needs a while for it."""
        assert machine.notice_s is not None
        assert machine.ends_s is not None
        return _now_s() >= (machine.notice_s + machine.ends_s) / 2

    def _schedule(self, pod: Body) -> None:
        if "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] != "Pending":
            return
        machine = None
        if not self.troubles.now("capacity"):
            command = pod["spec"]["containers"][0]["command"]
            machine = self.site.rent(pod["metadata"]["name"], command, {})
        unschedulable = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient cpu.",
        }
        scheduled = {"type": "PodScheduled", "status": "True"}
        pod["status"]["conditions"] = [scheduled if machine else unschedulable]
        if machine is not None:
            self.memory.machines[pod["metadata"]["uid"]] = machine.number

    def _end(self, pod: Body, machine: Machine) -> None:
        status = pod["status"]
        if status["phase"] in ("Succeeded", "Failed"):
            if "deletionTimestamp" in pod["metadata"] and not self._job_of(pod):
                self._drop("pods", pod)
            return
        code = 137 if machine.exit_code is None else machine.exit_code
        status["phase"] = "Succeeded" if code == 0 else "Failed"
        terminated = {"exitCode": code, "finishedAt": _now()}
        container = pod["spec"]["containers"][0]
        status["containerStatuses"] = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": container["image"],
                "ready": False,
                "restartCount": 0,
                "state": {"terminated": terminated},
            }
        ]
        if machine.exit_code is None and machine.why != "stopped":
            _disrupted(status, "DeletionByPodGC", "PodGC: node no longer exists")

    def _job_of(self, pod: Body) -> Body | None:
        owners = {one["uid"] for one in pod["metadata"].get("ownerReferences", [])}
        jobs = (job for job in self._objects("jobs") if job["metadata"]["uid"] in owners)
        return next(jobs, None)

    # --- on a machine ------------------------------------------------------------------------

    def environment(self, machine: Machine) -> Mapping[str, str]:
        pods = (one for one in self._objects("pods") if one["metadata"]["name"] == machine.task)
        pod = next(pods, None)
        if pod is None:
            return {}
        container = pod["spec"]["containers"][0]
        told = {"JOB_COMPLETION_INDEX": str(_index(pod)), "KUBERNETES_SERVICE_HOST": ""}
        for source in container.get("envFrom", []):
            told |= self._secret(pod, source["secretRef"]["name"])
        fields = {"status.podIP": self.site.host(machine), "spec.nodeName": _node(machine)}
        for variable in container.get("env", []):
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            told[variable["name"]] = variable.get("value") or fields[field]
        return told

    def _secret(self, pod: Body, name: str) -> dict[str, str]:
        secret = self._find("secrets", pod["metadata"]["namespace"], name)
        return {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}

    def metadata(self, machine: Machine, request: Request) -> Reply | None:
        return None


def _verb(method: str, name: str | None) -> str:
    if method == "GET":
        return "list" if name is None else "get"
    return {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method, method.lower())


def _applies(rule: Mapping[str, Any], pod: Body) -> bool:
    if "onPodConditions" in rule:
        wanted = {(one["type"], one.get("status", "True")) for one in rule["onPodConditions"]}
        there = {(one["type"], one["status"]) for one in pod["status"].get("conditions", [])}
        return bool(wanted & there)
    told = rule["onExitCodes"]
    codes = [
        one["state"]["terminated"]["exitCode"] for one in pod["status"].get("containerStatuses", [])
    ]
    if told["operator"] == "In":
        return any(code in told["values"] for code in codes)
    return any(code not in told["values"] for code in codes if code != 0)


def _disrupted(status: Body, reason: str, message: str) -> None:
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": _now(),
    }
    known = status.setdefault("conditions", [])
    if not any(one["type"] == "DisruptionTarget" for one in known):
        known.append(condition)


def _ready(status: Body, told: str) -> None:
    others = [one for one in status.get("conditions", []) if one["type"] != "Ready"]
    status["conditions"] = [*others, {"type": "Ready", "status": told}]


def _field(one: Body, path: str) -> Any:
    """What stands at 'involvedObject.name' or the like."""
    for name in path.split("."):
        one = one.get(name, {})
    return one


def _is_called(one: Body, space: str, name: str) -> bool:
    meta = one["metadata"]
    return bool(meta["name"] == name and meta.get("namespace", space) == space)


def _is_owned(one: Body, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", []))


def _index(pod: Body) -> int:
    return int(pod["metadata"]["labels"][_INDEX])


def _indexes(text: str | None) -> set[int]:
    return {int(part) for part in filter(None, (text or "").split(","))}


def _add(status: Body, name: str, index: int) -> None:
    status[name] = ",".join(str(one) for one in sorted(_indexes(status.get(name)) | {index}))


def _merge(into: Body, change: Body) -> None:
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _node(machine: Machine) -> str:
    return f"spot-{machine.number}"


def _node_of(machine: Machine) -> Body:
    """With the taints that the termination handler of AWS leaves on nodes that are taken back, or
    that it was advised to leave."""
    told = {"spot-itn": machine.notice_s, "rebalance-recommendation": machine.advised_s}
    taints = [
        {"key": f"aws-node-termination-handler/{word}", "effect": "NoSchedule"}
        for word, since in told.items()
        if since is not None
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": _node(machine), "uid": _node(machine)},
        "spec": {"taints": taints} if taints else {},
    }


def _now_s() -> float:
    return clocks.wall_ms() / 1000


def _now() -> str:
    return datetime.fromtimestamp(_now_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _resources(version: str) -> Body:
    """What `kubectl` wants to know before it asks for anything."""
    short = {
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
                "shortNames": short[kind],
                "verbs": ["create", "delete", "get", "list", "patch"],
            }
            for kind, (its_version, name) in _KINDS.items()
            if its_version == version
        ],
    }


_BATCH = {"groupVersion": "batch/v1", "version": "v1"}
_DISCOVERY: Mapping[str, Body] = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0-simulated"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "batch", "versions": [_BATCH], "preferredVersion": _BATCH}],
    },
    "/api/v1": _resources("v1"),
    "/apis/batch/v1": _resources("batch/v1"),
}
