"""The calls to a cluster, and its complaints in our words. Nothing is decided here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host.extras import need
from spotfit.provision.output import tail
from spotfit_provisioners.kubernetes.render import JOB_LABEL

_CALL_S = 20.0


@dataclass(frozen=True, slots=True)
class Right:
    """To do that with such things: of this namespace, or of the whole cluster."""

    verb: str
    group: str
    resource: str
    part: str = ""
    """Of the resource: 'log'."""
    everywhere: bool = False

    @property
    def told(self) -> str:
        return f"{self.verb} {self.resource}{'/' if self.part else ''}{self.part}"


class Cluster:
    """One namespace of one cluster. Raises our errors for what waiting does not cure, and the
    library's own for the rest."""

    def __init__(self, api: Any, namespace: str) -> None:
        kubernetes = need("kubernetes.client", extra="kubernetes")
        self.namespace = namespace
        self._batch = kubernetes.BatchV1Api(api)
        self._core = kubernetes.CoreV1Api(api)
        self._rights = kubernetes.AuthorizationV1Api(api)
        self._scheduling = kubernetes.SchedulingV1Api(api)

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was created; None if something of that name was there before."""
        make: Mapping[str, Callable[..., Any]] = {
            "Job": self._batch.create_namespaced_job,
            "Secret": self._core.create_namespaced_secret,
            "Service": self._core.create_namespaced_service,
        }
        with _told_as_ours(f"create a {kind}"):
            try:
                return _plain(make[kind](self.namespace, dict(body), **_RAW))
            except _api_exception() as refused:
                if refused.status == 409:
                    return None
                raise

    def own(self, job: Mapping[str, Any]) -> None:
        """Let the Job's Secret and Service go when it goes; may be done again."""
        name = job["metadata"]["name"]
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": job["metadata"]["uid"],
        }
        change = {"metadata": {"ownerReferences": [owner]}}
        patches = (self._core.patch_namespaced_secret, self._core.patch_namespaced_service)
        with _told_as_ours("patch a Secret"):
            for patch in patches:
                _found(partial(patch, name, self.namespace, change, **_RAW))

    def job(self, name: str) -> dict[str, Any] | None:
        """That Job, if there is one."""
        with _told_as_ours("look at a Job"):
            return _found(lambda: self._batch.read_namespaced_job(name, self.namespace, **_RAW))

    def pods(self, job: str) -> list[dict[str, Any]]:
        """Its pods, those that ended too while they are kept."""
        selector = f"{JOB_LABEL}={job}"
        with _told_as_ours("list pods"):
            told = self._core.list_namespaced_pod(self.namespace, label_selector=selector, **_RAW)
        return list(_plain(told)["items"])

    def complaint(self, job: str) -> str:
        """What the Job's controller said last of pods that it could not make; '' for nothing, and
        where we may not list events."""
        which = f"involvedObject.kind=Job,involvedObject.name={job},reason=FailedCreate"
        with _told_as_ours("list events"):
            try:
                told = self._core.list_namespaced_event(
                    self.namespace, field_selector=which, **_RAW
                )
            except _api_exception() as refused:
                if refused.status == 403:
                    return ""
                raise
        events = sorted(_plain(told)["items"], key=lambda one: str(one.get("lastTimestamp") or ""))
        return str(events[-1].get("message", "")) if events else ""

    def printed(self, pod: str, last: int) -> tuple[str, ...]:
        """The last lines of its container; of one that did not start, what the cluster says of it
        instead, and nothing of a pod that is gone."""
        with _told_as_ours("read a pod's log"):
            try:
                told = self._core.read_namespaced_pod_log(
                    pod, self.namespace, tail_lines=last, **_RAW
                )
            except _api_exception() as refused:
                if refused.status == 400:
                    return (_message(refused),)
                if refused.status == 404:
                    return ()
                raise
        return tail(bytes(told.data).decode(errors="replace"), last)

    def delete(self, job: str) -> None:
        """The Job, its pods, and what it owns; what is gone already is no error."""
        deletes = (
            lambda: self._batch.delete_namespaced_job(
                job, self.namespace, propagation_policy="Background", **_RAW
            ),
            lambda: self._core.delete_namespaced_secret(job, self.namespace, **_RAW),
            lambda: self._core.delete_namespaced_service(job, self.namespace, **_RAW),
        )
        with _told_as_ours("delete a Job"):
            for delete in deletes:
                _found(delete)

    def may(self, right: Right, who: str = "") -> bool:
        """Whether we may do that here, or whether `who` may: to ask that is a right of its own."""
        kind = "SubjectAccessReview" if who else "SelfSubjectAccessReview"
        asked = {
            "verb": right.verb,
            "group": right.group,
            "resource": right.resource,
            **({"subresource": right.part} if right.part else {}),
            **({} if right.everywhere else {"namespace": self.namespace}),
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": kind,
            "spec": {"resourceAttributes": asked, **({"user": who} if who else {})},
        }
        ask = (
            self._rights.create_subject_access_review
            if who
            else self._rights.create_self_subject_access_review
        )
        with _told_as_ours("ask what we may do" if not who else f"ask what {who} may do"):
            told = ask(review, **_RAW)
        return bool(_plain(told)["status"]["allowed"])

    def has(self, kind: str, name: str) -> bool:
        """Whether there is such a 'Namespace', 'ServiceAccount', 'Secret' or 'PriorityClass'."""
        here = self.namespace
        reads: Mapping[str, Callable[[], Any]] = {
            "Namespace": lambda: self._core.read_namespace(name, **_RAW),
            "ServiceAccount": lambda: self._core.read_namespaced_service_account(
                name, here, **_RAW
            ),
            "Secret": lambda: self._core.read_namespaced_secret(name, here, **_RAW),
            "PriorityClass": lambda: self._scheduling.read_priority_class(name, **_RAW),
        }
        with _told_as_ours(f"look at the {kind} {name}"):
            return _found(reads[kind]) is not None

    def would_take(self, job: Mapping[str, Any]) -> None:
        """Have the cluster admit that Job without keeping it. Raises what stands against it."""
        with _told_as_ours("create a Job"):
            self._batch.create_namespaced_job(self.namespace, dict(job), dry_run="All", **_RAW)


@cache
def open_cluster(server: str, context: str, namespace: str) -> Cluster:
    """By address, by the kubeconfig, or as the pod we are in. Raises `ConfigError`."""
    client = need("kubernetes.client", extra="kubernetes")
    config = need("kubernetes.config", extra="kubernetes")
    settings = client.Configuration()
    settings.retries = 2
    if server:
        settings.host = server
        return Cluster(client.ApiClient(settings), namespace or "default")
    try:
        config.load_incluster_config(settings)
        return Cluster(client.ApiClient(settings), namespace or _own_namespace())
    except config.ConfigException:
        pass  # not in a pod: the kubeconfig says where to go
    try:
        config.load_kube_config(context=context or None, client_configuration=settings)
        _, current = config.list_kube_config_contexts()
    except config.ConfigException as none:
        raise ConfigError(
            f"There is no cluster to ask: {none}",
            do="Set KUBECONFIG, or KubernetesOptions(context=…), or run inside a pod.",
        ) from none
    told = current["context"].get("namespace", "default") if current else "default"
    return Cluster(client.ApiClient(settings), namespace or told)


_RAW: Mapping[str, Any] = {"_preload_content": False, "_request_timeout": _CALL_S}
"""Answers as plain JSON: the library's own classes cost a second to import and to check."""


def _own_namespace() -> str:
    from pathlib import Path

    path = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return path.read_text().strip() if path.exists() else "default"


def _plain(answer: Any) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.json.decode(bytes(answer.data))
    return told


def _found(call: Callable[[], Any]) -> dict[str, Any] | None:
    try:
        return _plain(call())
    except _api_exception() as missing:
        if missing.status == 404:
            return None
        raise


@cache
def _api_exception() -> Any:
    return need("kubernetes.client.exceptions", extra="kubernetes").ApiException


@contextlib.contextmanager
def _told_as_ours(what: str) -> Iterator[None]:
    try:
        yield
    except _api_exception() as refused:
        error = translated(what, int(refused.status or 0), _message(refused))
        if error is None:
            raise
        raise error from refused


def _message(refused: Any) -> str:
    try:
        return str(msgspec.json.decode(refused.body or b"{}").get("message", refused.reason))
    except (msgspec.DecodeError, AttributeError):
        return str(refused.reason)


def translated(what: str, status: int, message: str) -> ProvisionError | None:
    """None for what may pass: too many requests, conflicts, and whatever is the server's fault."""
    if status == 401:
        return ProvisionPermissionError(
            f"The cluster does not know who asks to {what}: {message}",
            do="Log in again (`kubectl auth whoami`), or give the pod a service account.",
        )
    if status == 403 and "quota" in message.lower():
        return QuotaError(
            f"A quota of the namespace stands against this ({what}): {message}",
            do="Ask for a larger ResourceQuota, or for fewer or smaller machines.",
        )
    if status == 403:
        return ProvisionPermissionError(
            f"The cluster does not allow us to {what}: {message}",
            do="Bind the role in infra/terraform/modules/kubernetes to whoever asks.",
        )
    if 400 <= status < 500 and status not in (408, 409, 429):
        return ProvisionError(f"The cluster refused to {what}: {message}")
    return None
