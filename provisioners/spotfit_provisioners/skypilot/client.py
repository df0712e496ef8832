"""Calls of SkyPilot's API server through its SDK, and translation of their errors.

Contains no decisions. Most calls create a request with an id, by which the result is fetched. The
SDK is prevented from starting a local API server, which would not know the machines of the run.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from spotfit.core.errors import (
    InfrastructureError,
    ProvisionError,
    ProvisionPermissionError,
    SpotfitError,
)
from spotfit.host import env
from spotfit.host.plugins import require_module
from spotfit.provision.api import last_lines
from spotfit_provisioners.skypilot.render import ENDPOINT_VARIABLE, NO_LOCAL_SERVER_VARIABLE
from spotfit_provisioners.skypilot.states import SkyPilotJob, UsageInterval

_JOB_FIELDS = ("job_id", "job_name", "status", "failure_reason", "details")
_PENDING_STATES = ("PENDING", "WAITING", "RUNNING")
_LAUNCH_JOB_REQUEST, _LAUNCH_REQUEST = "sky.jobs.launch", "sky.launch"
_ANSI_COLORS = re.compile(r"\x1b\[[0-9;]*m")

# Class names of SkyPilot's exceptions (sky/exceptions.py), which its client raises again.
_PERMISSION_ERRORS = (
    "ApiServerAuthenticationError",
    "CloudUserIdentityError",
    "InvalidCloudCredentials",
    "NoCloudAccessError",
    "NoWorkspaceAccessError",
    "PermissionDeniedError",
    "UserRequestRejectedByPolicy",
)
_NO_CAPACITY_ERROR = "ResourcesUnavailableError"
_NO_MACHINE_ERRORS = (_NO_CAPACITY_ERROR, "ResourcesMismatchError")
_CLIENT_ERRORS = (
    "APINotSupportedError",
    "APIVersionMismatchError",
    "InvalidCloudConfigs",
    "InvalidSkyPilotConfigError",
    "NotSupportedError",
    "ProvisionPrechecksError",
    "ValueError",
)
_CONNECTION_ERRORS = ("ApiServerConnectionError",)
_LOCAL_SERVER_DISABLED = "starting a local API server on this machine is disabled"
_CLUSTER_NOT_UP_ERROR = "ClusterNotUpError"
_CLUSTER_MISSING_ERROR = "ClusterDoesNotExist"
# Raised for a machine that does not answer. It may just have been preempted.
_UNRESPONSIVE_ERRORS = ("CommandError", "FetchClusterInfoError", "SkyletUnavailableError")

# SkyPilot blocks while it recovers a lost machine; output that is printed until then is enough.
_LOG_TIMEOUT_S = 60.0


class _RequestTimeoutError(InfrastructureError):
    """The API server did not answer in time."""


class SkyPilotRequest(msgspec.Struct, frozen=True):
    """A launch request of the API server."""

    id: str
    state: str

    @property
    def is_pending(self) -> bool:
        return self.state in _PENDING_STATES


class LaunchFailure(msgspec.Struct, frozen=True):
    """The reason of a failed launch."""

    reason: str
    is_capacity_error: bool = False
    """No infrastructure had such a machine."""


class SkyPilotClient:
    """The SkyPilot API.

    Permanent errors are raised as `ProvisionError`, transient ones as `InfrastructureError` or the
    SDK's.
    """

    def __init__(self, endpoint: str, *, request_timeout_s: float) -> None:
        self._request_timeout_s = request_timeout_s
        self._endpoint = endpoint

    def open(self) -> None:
        """Import the SDK. Raises `MissingExtraError` if it is not installed."""
        assert self._sky is not None

    def describe_server(self) -> str:
        """Return the version of the API server."""
        with self._translate_errors("describe the API server"):
            info = self._sky.api_info()
        return f"version {info.version}"

    def list_clouds(self) -> list[str]:
        """Return the clouds that SkyPilot has access to."""
        with self._translate_errors("list enabled clouds"):
            # Configures the SDK first. The function is not exported by `sky`.
            sdk = self._sky and require_module("sky.client.sdk", extra="skypilot")
            return [str(cloud) for cloud in self._await_answer(sdk.enabled_clouds())]

    def check_catalog(self, task: Mapping[str, Any]) -> None:
        """Raise `ProvisionError` if SkyPilot's catalog has no machine for the task.

        Makes no request to a cloud.
        """
        with self._translate_errors("find a machine"):
            dag = self._sky.Dag()
            dag.add(self._task(task))
            self._await_answer(self._sky.optimize(dag))

    # --- managed jobs ------------------------------------------------------------------------

    def launch_job(self, task: Mapping[str, Any]) -> str:
        """Launch a managed job and return the id of the request."""
        with self._translate_errors("launch a managed job"):
            # Without a job group: by default it would join the group of the job in which this
            # agent runs, and be cancelled with it.
            request = self._sky.jobs.launch(self._task(task), name=task["name"], job_group=None)
            return str(request)

    def list_jobs(self, prefix: str) -> list[SkyPilotJob]:
        """Return the jobs of all users whose name has the prefix, oldest first.

        Empty if there is no jobs controller, which stops when it has no jobs.
        """
        with self._translate_errors("list managed jobs"):
            try:
                response = self._await_answer(
                    self._sky.jobs.queue_v2(
                        refresh=False, all_users=True, name_match=prefix, fields=list(_JOB_FIELDS)
                    )
                )
            except Exception as error:
                if _has_no_controller(error):
                    return []
                raise
        jobs = []
        # `name_match` may match elsewhere in a name.
        for record in response[0]:
            if str(record.job_name).startswith(prefix):
                reason, details = (str(record.failure_reason or ""), str(record.details or ""))
                job = SkyPilotJob(
                    id=int(record.job_id),
                    name=str(record.job_name),
                    state=str(getattr(record.status, "value", record.status)),
                    reason=reason if reason not in ("", "-") else details,
                )
                jobs.append(job)
        return sorted(jobs, key=lambda job: job.id)

    def list_launching_jobs(self) -> dict[str, str]:
        """Return request ids by job name for the pending launches of this user."""
        with self._translate_errors("list requests"):
            requests = self._sky.api_status(all_status=False)
        # The name of the job is only in the body of its request, as JSON.
        launches = (
            (request.request_id, request.request_body)
            for request in requests
            if request.name == _LAUNCH_JOB_REQUEST
        )
        return {name: id_ for id_, body in launches if (name := _requested_job_name(body))}

    def cancel_jobs(self, ids: Sequence[int]) -> None:
        """Cancel the jobs. No effect on jobs that have ended."""
        with self._translate_errors("cancel managed jobs"):
            self._await_answer(self._sky.jobs.cancel(job_ids=list(ids)))

    def read_job_log(self, id_: int, max_lines: int) -> tuple[str, ...]:
        """Return the last lines of the job's log. The jobs controller keeps it after the end."""
        with self._translate_errors("read the log of a managed job"):
            return self._read_log(
                max_lines,
                lambda to: self._sky.jobs.tail_logs(
                    job_id=id_, follow=False, tail=max_lines, output_stream=to
                ),
            )

    # --- clusters ----------------------------------------------------------------------------

    def launch_cluster(self, task: Mapping[str, Any]) -> str:
        """Launch a cluster that is torn down after its task; return the id of the request."""
        with self._translate_errors("launch a cluster"):
            # down=True: a cluster whose agent has ended would otherwise stay rented.
            return str(self._sky.launch(self._task(task), cluster_name=task["name"], down=True))

    def cluster_states(self, names: Sequence[str]) -> dict[str, str]:
        """Return the states of the clusters that exist, by name."""
        with self._translate_errors("list clusters"):
            # AUTO queries the cloud for clusters that may have been preempted.
            clusters = self._await_answer(
                self._sky.status(
                    cluster_names=list(names),
                    refresh=self._sky.StatusRefreshMode.AUTO,
                    all_users=True,
                )
            )
        return {str(cluster.name): str(cluster.status.value) for cluster in clusters}

    def cluster_usage(self, names: Sequence[str]) -> dict[str, UsageInterval]:
        """Return the last usage interval of each of the clusters that SkyPilot knows, by name.

        Includes clusters that exist no more. By it SkyPilot computes the cost of a cluster.
        """
        with self._translate_errors("report the usage of clusters"):
            # Of existing clusters and those of the last day, the newest first.
            records = self._await_answer(self._sky.cost_report(days=1))
        # `launched_at` of a cluster is not used: it is the end of its setup, and later the time of
        # the last `sky launch` (add_or_update_cluster in sky/global_user_state.py of 0.14.1).
        return {
            str(record["name"]): UsageInterval(*record["usage_intervals"][-1])
            for record in reversed(records)
            if record["name"] in names and record["usage_intervals"]
        }

    def list_launches(self, cluster: str) -> list[SkyPilotRequest]:
        """Return the known launch requests of the cluster, newest first."""
        with self._translate_errors("list requests"):
            self._sky.api_info()  # otherwise the SDK warns about an outdated server
            requests = self._sky.api_status(all_status=True, cluster_name=cluster)
        launches = [
            request
            for request in requests
            if request.name == _LAUNCH_REQUEST and request.cluster_name == cluster
        ]
        launches.sort(key=lambda request: -float(request.created_at))
        return [SkyPilotRequest(str(launch.request_id), str(launch.status)) for launch in launches]

    def find_failure(self, request: str) -> LaunchFailure:
        """Return the failure of a finished request; an empty reason if it succeeded."""
        try:
            self._await_answer(request)
        except Exception as error:  # noqa: BLE001  # any error of the request is its reason
            return LaunchFailure(_error_text(error), _is_named(error, _NO_CAPACITY_ERROR))
        return LaunchFailure("")

    def abort_requests(self, requests: Sequence[str]) -> None:
        """Abort pending requests."""
        with self._translate_errors("abort requests"):
            # silent: the SDK would otherwise print on the terminal of the user.
            self._await_answer(self._sky.api_cancel(list(requests), silent=True))

    def tear_down(self, cluster: str) -> None:
        """Terminate the cluster. No error if it does not exist."""
        with self._translate_errors("tear down a cluster"):
            try:
                self._await_answer(self._sky.down(cluster))
            except Exception as error:
                if not _is_named(error, _CLUSTER_MISSING_ERROR):
                    raise

    def read_cluster_log(self, cluster: str, max_lines: int) -> tuple[str, ...]:
        """Return the last lines of the cluster's task.

        Empty if the cluster does not exist, is not up, or does not answer.
        """
        with self._translate_errors("read the log of a cluster"):
            try:
                return self._read_log(
                    max_lines,
                    lambda to: self._sky.tail_logs(
                        cluster, job_id=None, follow=False, tail=max_lines, output_stream=to
                    ),
                )
            except Exception as error:
                if not _is_named(
                    error, _CLUSTER_MISSING_ERROR, _CLUSTER_NOT_UP_ERROR, *_UNRESPONSIVE_ERRORS
                ):
                    raise
                return ()

    # --- requests ----------------------------------------------------------------------------

    def wait_for(self, request: str) -> None:
        """Wait until the request has finished. Raises its error."""
        with self._translate_errors("finish a request"):
            self._await_answer(request)

    @property
    def _sky(self) -> Any:
        """The SDK, configured with the endpoint of the options."""
        env.set_defaults({NO_LOCAL_SERVER_VARIABLE: "1"})
        if not self._endpoint or env.lookup(ENDPOINT_VARIABLE) == self._endpoint:
            return require_module("sky", extra="skypilot")
        sky, common = (
            require_module(name, extra="skypilot") for name in ("sky", "sky.server.common")
        )
        # The SDK caches the first endpoint, so its caches are cleared after a change.
        env.update({ENDPOINT_VARIABLE: self._endpoint})
        common.get_server_url.cache_clear()
        common.is_api_server_local.cache_clear()
        return sky

    def _task(self, body: Mapping[str, Any]) -> Any:
        # Through JSON: the SDK expects plain dicts and lists, and changes them.
        return self._sky.Task.from_yaml_config(msgspec.json.decode(msgspec.json.encode(body)))

    def _read_log(
        self, max_lines: int, print_to: Callable[[io.StringIO], object]
    ) -> tuple[str, ...]:
        """Return the lines that arrive within `_LOG_TIMEOUT_S`."""
        output = io.StringIO()
        with contextlib.suppress(_RequestTimeoutError):
            self._call_with_timeout(
                "return the log", lambda: print_to(output), timeout_s=_LOG_TIMEOUT_S
            )
        return last_lines(_ANSI_COLORS.sub("", output.getvalue()), max_lines)

    def _await_answer(self, request: str) -> Any:
        """Return the result of the request, or raise its error."""
        return self._call_with_timeout(
            f"finish request {request}",
            lambda: self._sky.get(request),
            timeout_s=self._request_timeout_s,
        )

    def _call_with_timeout(self, action: str, call: Callable[[], Any], *, timeout_s: float) -> Any:
        """Call in a daemon thread with a time limit: the SDK waits indefinitely."""
        results: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        # The SDK keeps its user and server in context variables.
        context = contextvars.copy_context()

        def run() -> None:
            try:
                results.put((context.run(call), None))
            except Exception as error:  # noqa: BLE001  # raised again in the waiting thread
                results.put((None, error))

        # Daemon: a thread that still waits must not delay the exit of the process.
        threading.Thread(target=run, name="skypilot", daemon=True).start()
        try:
            result, error = results.get(timeout=timeout_s)
        except queue.Empty as timeout:
            raise _RequestTimeoutError(
                f"SkyPilot's API server did not {action} within {timeout_s:.0f} s."
            ) from timeout
        if error is not None:
            raise error
        return result

    @contextlib.contextmanager
    def _translate_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except SpotfitError:  # translated already, or the timeout of a request
            raise
        except Exception as error:
            translated = to_provision_error(action, error, endpoint=self._endpoint)
            if translated is None:
                raise
            raise translated from error


def to_provision_error(
    action: str, error: Exception, *, endpoint: str = ""
) -> ProvisionError | InfrastructureError | None:
    """Translate a permanent error, or an unreachable server; return None for transient errors."""
    text = _error_text(error)
    refused = _is_named(error, "ConnectionError") and "refused" in text
    if refused or _is_named(error, *_CONNECTION_ERRORS) or _LOCAL_SERVER_DISABLED in text:
        # Transient on a machine of the run, and for a configured endpoint: other agents, or later
        # requests, may reach the server.
        if env.lookup("SKYPILOT_TASK_ID") or endpoint:
            return InfrastructureError(
                f"The SkyPilot API server does not answer: {text}",
                do="Check `sky api info` and SkyPilotOptions(endpoint=URL); the machines must "
                "reach the server.",
            )
        return ProvisionError(
            f"No SkyPilot API server answers: {text}",
            do="Start one with `sky api start`, log in with `sky api login -e URL`, or set "
            "SkyPilotOptions(endpoint=URL). The machines need a server that they can reach, "
            "because agents submit replacements.",
        )
    if _is_named(error, *_PERMISSION_ERRORS):
        return ProvisionPermissionError(
            f"SkyPilot has no permission to {action}: {text}",
            do="Run `sky check`, which shows the clouds that SkyPilot has access to, and `sky api "
            "login`, which logs in to an API server.",
        )
    if _is_named(error, *_NO_MACHINE_ERRORS):
        return ProvisionError(
            f"No SkyPilot offering matches the request: {text}",
            do="Request less, or allow more infrastructure: SkyPilotOptions(infra=…, "
            "accelerator=…, spot=…); `sky show-gpus` lists offerings.",
        )
    if _is_named(error, *_CLIENT_ERRORS):
        return ProvisionError(
            f"SkyPilot rejected the request to {action}: {text}",
            do="Correct SkyPilotOptions; `spotfit doctor --provisioner skypilot` checks them.",
        )
    return None


def _is_named(error: Exception, *names: str) -> bool:
    # By the exact name: the exception classes cannot be imported without the SDK, and subclasses
    # have other meanings (an unreachable cloud is a subclass of missing resources).
    return type(error).__name__ in names


def _has_no_controller(error: Exception) -> bool:
    """Return whether there is no jobs controller, or it has stopped."""
    status = getattr(error, "cluster_status", None)
    return _is_named(error, _CLUSTER_NOT_UP_ERROR) and str(getattr(status, "value", status)) in (
        "None",
        "STOPPED",
    )


def _error_text(error: Exception) -> str:
    return " ".join(_ANSI_COLORS.sub("", str(error)).split()) or type(error).__name__


def _requested_job_name(body: str) -> str:
    """Return the job name in the body of a launch request; '' if there is none."""
    with contextlib.suppress(msgspec.DecodeError):
        decoded = msgspec.json.decode(body)
        if isinstance(decoded, dict):
            return str(decoded.get("name") or "")
    return ""
