"""Calls of the Kubernetes API, and translation of their errors. Contains no decisions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host.plugins import require_module
from spotfit.provision.api import last_lines
from spotfit_provisioners.kubernetes.render import JOB_LABEL

_REQUEST_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class KubernetesPermission:
    """An RBAC permission in the namespace, or cluster-wide."""

    verb: str
    group: str
    resource: str
    subresource: str = ""
    """For example 'log'."""
    is_cluster_wide: bool = False

    @property
    def description(self) -> str:
        return f"{self.verb} {self.resource}{'/' if self.subresource else ''}{self.subresource}"


class KubernetesClient:
    """The API of one namespace of one cluster.

    Permanent errors are raised as `ProvisionError`, transient ones as the library's.
    """

    def __init__(self, api: Any, namespace: str) -> None:
        kubernetes = require_module("kubernetes.client", extra="kubernetes")
        self.namespace = namespace
        self._batch = kubernetes.BatchV1Api(api)
        self._core = kubernetes.CoreV1Api(api)
        self._authorization = kubernetes.AuthorizationV1Api(api)
        self._scheduling = kubernetes.SchedulingV1Api(api)

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the created object, or None if an object of that name exists."""
        create: Mapping[str, Callable[..., Any]] = {
            "Job": self._batch.create_namespaced_job,
            "Secret": self._core.create_namespaced_secret,
            "Service": self._core.create_namespaced_service,
        }
        with _translate_errors(f"create a {kind}"):
            try:
                return _decode_response(create[kind](self.namespace, dict(body), **_RAW_RESPONSE))
            except _api_exception() as error:
                if error.status == 409:  # AlreadyExists
                    return None
                raise

    def set_owner(self, job: Mapping[str, Any]) -> None:
        """Make the Job own its Secret and Service, so that they are deleted with it. Idempotent."""
        name = job["metadata"]["name"]
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": job["metadata"]["uid"],
        }
        change = {"metadata": {"ownerReferences": [owner]}}
        # Strategic merge patches add to the list of owners, and leave an equal entry as it is.
        patches = (self._core.patch_namespaced_secret, self._core.patch_namespaced_service)
        with _translate_errors("patch a Secret"):
            for patch in patches:
                _none_if_missing(partial(patch, name, self.namespace, change, **_RAW_RESPONSE))

    def find_job(self, name: str) -> dict[str, Any] | None:
        """Return the Job, or None if it does not exist."""
        with _translate_errors("read a Job"):
            return _none_if_missing(
                lambda: self._batch.read_namespaced_job(name, self.namespace, **_RAW_RESPONSE)
            )

    def list_pods(self, job: str) -> list[dict[str, Any]]:
        """Return the pods of the Job, including ended ones that the cluster still keeps."""
        selector = f"{JOB_LABEL}={job}"
        with _translate_errors("list pods"):
            response = self._core.list_namespaced_pod(
                self.namespace, label_selector=selector, **_RAW_RESPONSE
            )
        return list(_decode_response(response)["items"])

    def last_pod_creation_error(self, job: str) -> str:
        """Return the last event of the Job's controller about pods that it could not create.

        '' if there is none, or if the caller may not list events.
        """
        selector = f"involvedObject.kind=Job,involvedObject.name={job},reason=FailedCreate"
        with _translate_errors("list events"):
            try:
                response = self._core.list_namespaced_event(
                    self.namespace, field_selector=selector, **_RAW_RESPONSE
                )
            except _api_exception() as error:
                if error.status == 403:  # the group can be observed without this detail
                    return ""
                raise
        events = sorted(
            _decode_response(response)["items"],
            key=lambda event: str(event.get("lastTimestamp") or ""),
        )
        return str(events[-1].get("message", "")) if events else ""

    def read_pod_log(self, pod: str, max_lines: int) -> tuple[str, ...]:
        """Return the last lines of the pod's log; empty if the pod does not exist.

        For a container that has not started, the cluster's message is returned instead.
        """
        with _translate_errors("read a pod's log"):
            try:
                response = self._core.read_namespaced_pod_log(
                    pod, self.namespace, tail_lines=max_lines, **_RAW_RESPONSE
                )
            except _api_exception() as error:
                if error.status == 400:  # the container has not started
                    return (_error_message(error),)
                if error.status == 404:
                    return ()
                raise
        return last_lines(bytes(response.data).decode(errors="replace"), max_lines)

    def delete_job(self, job: str) -> None:
        """Delete the Job, its pods, Secret and Service. No error for missing objects."""
        # The default policy of batch/v1 leaves the pods as orphans. The other objects are deleted
        # explicitly, because an interrupted submission may not have made the Job their owner.
        deletes = (
            lambda: self._batch.delete_namespaced_job(
                job, self.namespace, propagation_policy="Background", **_RAW_RESPONSE
            ),
            lambda: self._core.delete_namespaced_secret(job, self.namespace, **_RAW_RESPONSE),
            lambda: self._core.delete_namespaced_service(job, self.namespace, **_RAW_RESPONSE),
        )
        with _translate_errors("delete a Job"):
            for delete in deletes:
                _none_if_missing(delete)

    def is_allowed(self, permission: KubernetesPermission, user: str = "") -> bool:
        """Return whether the caller, or `user`, has the permission.

        Reviewing another user needs the permission to create SubjectAccessReviews.
        """
        kind = "SubjectAccessReview" if user else "SelfSubjectAccessReview"
        attributes = {
            "verb": permission.verb,
            "group": permission.group,
            "resource": permission.resource,
            **({"subresource": permission.subresource} if permission.subresource else {}),
            **({} if permission.is_cluster_wide else {"namespace": self.namespace}),
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": kind,
            "spec": {"resourceAttributes": attributes, **({"user": user} if user else {})},
        }
        create_review = (
            self._authorization.create_subject_access_review
            if user
            else self._authorization.create_self_subject_access_review
        )
        with _translate_errors(f"review access of {user or 'the caller'}"):
            response = create_review(review, **_RAW_RESPONSE)
        return bool(_decode_response(response)["status"]["allowed"])

    def exists(self, kind: str, name: str) -> bool:
        """Return whether the Namespace, ServiceAccount, Secret or PriorityClass exists."""
        namespace = self.namespace
        reads: Mapping[str, Callable[[], Any]] = {
            "Namespace": lambda: self._core.read_namespace(name, **_RAW_RESPONSE),
            "ServiceAccount": lambda: self._core.read_namespaced_service_account(
                name, namespace, **_RAW_RESPONSE
            ),
            "Secret": lambda: self._core.read_namespaced_secret(name, namespace, **_RAW_RESPONSE),
            "PriorityClass": lambda: self._scheduling.read_priority_class(name, **_RAW_RESPONSE),
        }
        with _translate_errors(f"read the {kind} {name}"):
            return _none_if_missing(reads[kind]) is not None

    def dry_run(self, body: Mapping[str, Any]) -> None:
        """Create the Job or Pod as a dry run. Raises the error with which the cluster rejects it.

        Unknown fields are errors, which the API server otherwise ignores with a warning.
        """
        create: Mapping[str, Callable[..., Any]] = {
            "Job": self._batch.create_namespaced_job,
            "Pod": self._core.create_namespaced_pod,
        }
        kind = body["kind"]
        with _translate_errors(f"create a {kind}"):
            create[kind](
                self.namespace,
                dict(body),
                dry_run="All",
                field_validation="Strict",
                **_RAW_RESPONSE,
            )


@cache
def open_kubernetes_client(server: str, context: str, namespace: str) -> KubernetesClient:
    """Connect to `server`, or as the pod of this process, or with the kubeconfig.

    Raises `ConfigError` if no cluster is configured.
    """
    client = require_module("kubernetes.client", extra="kubernetes")
    config = require_module("kubernetes.config", extra="kubernetes")
    settings = client.Configuration()
    settings.retries = 2  # of urllib3, for connection errors; the leader must not block for long
    if server:
        settings.host = server
        return KubernetesClient(client.ApiClient(settings), namespace or "default")
    try:
        config.load_incluster_config(settings)
        # The service account's directory also contains the namespace of the pod.
        own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        if not namespace:
            namespace = own.read_text().strip() if own.exists() else "default"
        return KubernetesClient(client.ApiClient(settings), namespace)
    except config.ConfigException:
        pass  # this process does not run in a pod: use the kubeconfig
    try:
        config.load_kube_config(context=context or None, client_configuration=settings)
        _, current = config.list_kube_config_contexts()
    except config.ConfigException as error:
        raise ConfigError(
            f"No Kubernetes cluster is configured for context {context or '(current)'}: {error}",
            do="Set KUBECONFIG to a kubeconfig file, or KubernetesOptions(context=…) to one of "
            "`kubectl config get-contexts`, or run inside a pod.",
        ) from error
    default = current["context"].get("namespace", "default") if current else "default"
    return KubernetesClient(client.ApiClient(settings), namespace or default)


# Return responses as plain JSON: importing the library's classes takes a second.
_RAW_RESPONSE: Mapping[str, Any] = {
    "_preload_content": False,
    "_request_timeout": _REQUEST_TIMEOUT_S,
}


def _decode_response(response: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(bytes(response.data))
    return decoded


def _none_if_missing(call: Callable[[], Any]) -> dict[str, Any] | None:
    try:
        return _decode_response(call())
    except _api_exception() as error:
        if error.status == 404:
            return None
        raise


@cache
def _api_exception() -> Any:
    return require_module("kubernetes.client.exceptions", extra="kubernetes").ApiException


@contextlib.contextmanager
def _translate_errors(action: str) -> Iterator[None]:
    try:
        yield
    except _api_exception() as error:
        translated = to_provision_error(action, int(error.status or 0), _error_message(error))
        if translated is None:
            raise
        raise translated from error


def _error_message(error: Any) -> str:
    try:
        return str(msgspec.json.decode(error.body or b"{}").get("message", error.reason))
    except (msgspec.DecodeError, AttributeError):  # the answer of a proxy, not of the API server
        return str(error.reason)


def to_provision_error(action: str, status: int, message: str) -> ProvisionError | None:
    """Translate a permanent error; return None for conflicts, rate limits and server errors."""
    if status == 401:
        return ProvisionPermissionError(
            f"Kubernetes authentication failed while trying to {action}: {message}",
            do="Log in again, until `kubectl auth whoami` succeeds; in a pod, give the pod a "
            "service account.",
        )
    # The admission plugin of ResourceQuota answers with 403, as RBAC does.
    if status == 403 and "quota" in message.lower():
        return QuotaError(
            f"The ResourceQuota of the namespace is exceeded while trying to {action}: {message}",
            do="Request a larger ResourceQuota from the administrators of the cluster, or use "
            "fewer or smaller machines.",
        )
    # https://kubernetes.io/docs/concepts/security/pod-security-admission/ rejects pods, not Jobs.
    if status == 403 and "violates PodSecurity" in message:
        return ProvisionError(
            f"The Pod Security Standard of the namespace rejects the request to {action}: "
            f"{message}",
            do="Remove what the message names from KubernetesOptions(pod_template=…), keep "
            "pod_security='restricted', or use a namespace with a less strict label "
            "pod-security.kubernetes.io/enforce.",
        )
    if status == 403:
        return ProvisionPermissionError(
            f"Kubernetes denied permission to {action}: {message}",
            do="Bind the role in infra/terraform/modules/kubernetes to the caller.",
        )
    # A repetition may resolve timeouts (408), conflicts (409) and rate limits (429).
    if 400 <= status < 500 and status not in (408, 409, 429):
        return ProvisionError(
            f"Kubernetes rejected the request to {action}: {message}",
            do="Correct KubernetesOptions; `spotfit doctor --provisioner kubernetes` checks them.",
        )
    return None
