"""The calls to SkyPilot's API server through its SDK, and its complaints in our words.

Nothing is decided here. Nearly every call is a request with an id, whose answer is fetched by it.
A server of one's own is never started in passing: one on a training machine would know of nothing.
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
    MachineError,
    ProvisionError,
    ProvisionPermissionError,
    SpotfitError,
)
from spotfit.host import env
from spotfit.host.extras import need
from spotfit.provision.output import tail
from spotfit_provisioners.skypilot.render import ENDPOINT, NO_LOCAL_SERVER
from spotfit_provisioners.skypilot.states import Job

_FIELDS = ("job_id", "job_name", "status", "failure_reason", "details")
_UNDER_WAY = ("PENDING", "WAITING", "RUNNING")
_LAUNCH_JOB, _LAUNCH = "sky.jobs.launch", "sky.launch"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_NO_ACCESS = (
    "ApiServerAuthenticationError",
    "CloudUserIdentityError",
    "InvalidCloudCredentials",
    "NoCloudAccessError",
    "NoWorkspaceAccessError",
    "PermissionDeniedError",
    "UserRequestRejectedByPolicy",
)
_NO_ROOM = "ResourcesUnavailableError"
_NO_MACHINE = (_NO_ROOM, "ResourcesMismatchError")
_MISTAKE = (
    "APINotSupportedError",
    "APIVersionMismatchError",
    "InvalidCloudConfigs",
    "InvalidSkyPilotConfigError",
    "NotSupportedError",
    "ProvisionPrechecksError",
    "ValueError",
)
_NO_SERVER = ("ApiServerConnectionError",)
_NOT_STARTED = "starting a local API server on this machine is disabled"
_NOT_UP = "ClusterNotUpError"
_NOT_THERE = "ClusterDoesNotExist"
_DUMB = ("CommandError", "FetchClusterInfoError", "SkyletUnavailableError")
"""Said of a machine that is there for SkyPilot, and does not answer: it may just have been lost."""


_LISTEN_S = 60.0


class _LateError(MachineError):
    """The server has not answered in time."""


class Request(msgspec.Struct, frozen=True):
    """A launch that the API server was asked for."""

    id: str
    state: str

    @property
    def under_way(self) -> bool:
        return self.state in _UNDER_WAY


class Failure(msgspec.Struct, frozen=True):
    """Why a launch came to nothing."""

    why: str
    no_room: bool = False
    """Whether no place had such a machine."""


class SkyClient:
    """SkyPilot, as far as groups need it. Raises our errors for what waiting does not cure, and
    `MachineError` or the SDK's own for the rest."""

    def __init__(self, endpoint: str, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._endpoint = endpoint

    def server(self) -> str:
        """Which API server answers, and in which version."""
        with self._told_as_ours("answer"):
            told = self._sky.api_info()
        return f"version {told.version}"

    def clouds(self) -> list[str]:
        """Those that SkyPilot has access to."""
        with self._told_as_ours("say which clouds it has access to"):
            return [str(cloud) for cloud in self._answer(self._sdk.enabled_clouds())]

    def would_take(self, task: Mapping[str, Any]) -> None:
        """Whether any place could have such a machine, by SkyPilot's catalog; nothing is asked of
        a cloud."""
        with self._told_as_ours("find a machine"):
            dag = self._sky.Dag()
            dag.add(self._task(task))
            self._answer(self._sky.optimize(dag))

    # --- managed jobs ------------------------------------------------------------------------

    def launch_job(self, task: Mapping[str, Any]) -> str:
        """The id of the request."""
        with self._told_as_ours("launch a managed job"):
            # Not in the group of jobs that we may be in ourselves: it would be cancelled with it.
            request = self._sky.jobs.launch(self._task(task), name=task["name"], job_group=None)
            return str(request)

    def jobs(self, prefix: str) -> list[Job]:
        """All whose name begins so, anybody's, the oldest first. None where there is no jobs
        controller: it stops when nothing is left to look after."""
        with self._told_as_ours("look at managed jobs"):
            try:
                told = self._answer(
                    self._sky.jobs.queue_v2(
                        refresh=False, all_users=True, name_match=prefix, fields=list(_FIELDS)
                    )
                )
            except Exception as wrong:
                if _nothing_to_look_after(wrong):
                    return []
                raise
        found = (_job(one) for one in told[0] if str(one.job_name).startswith(prefix))
        return sorted(found, key=lambda job: job.id)

    def launching_jobs(self) -> dict[str, str]:
        """Names of the managed jobs that are being launched, with their requests' ids.

        Only of our own user's: the server shows nobody what others have asked for.
        """
        with self._told_as_ours("look at requests"):
            told = self._sky.api_status(all_status=False)
        asked = ((one.request_id, one.request_body) for one in told if one.name == _LAUNCH_JOB)
        return {name: id_ for id_, body in asked if (name := _name_in(body))}

    def cancel_jobs(self, ids: Sequence[int]) -> None:
        """End them; those that are over stay as they are."""
        with self._told_as_ours("cancel managed jobs"):
            self._answer(self._sky.jobs.cancel(job_ids=list(ids)))

    def printed_by_job(self, id_: int, last: int) -> tuple[str, ...]:
        """The last lines of its task, which the jobs controller keeps when the machine is gone."""
        with self._told_as_ours("tell what a managed job printed"):
            return self._printed(
                last,
                lambda to: self._sky.jobs.tail_logs(
                    job_id=id_, follow=False, tail=last, output_stream=to
                ),
            )

    # --- clusters ----------------------------------------------------------------------------

    def launch_cluster(self, task: Mapping[str, Any]) -> str:
        """The id of the request. It is taken down when its task has ended."""
        with self._told_as_ours("launch a cluster"):
            return str(self._sky.launch(self._task(task), cluster_name=task["name"], down=True))

    def clusters(self, names: Sequence[str]) -> dict[str, str]:
        """The states of those that are there, looked up at the clouds where they may have been
        taken away."""
        with self._told_as_ours("look at clusters"):
            told = self._answer(
                self._sky.status(
                    cluster_names=list(names),
                    refresh=self._sky.StatusRefreshMode.AUTO,
                    all_users=True,
                )
            )
        return {str(one.name): str(one.status.value) for one in told}

    def launches(self, cluster: str) -> list[Request]:
        """Of that cluster, the newest first, as far as the server remembers."""
        with self._told_as_ours("look at requests"):
            self._sky.api_info()  # before it is told a version, the SDK warns of an old server
            told = self._sky.api_status(all_status=True, cluster_name=cluster)
        mine = [one for one in told if one.name == _LAUNCH and one.cluster_name == cluster]
        mine.sort(key=lambda one: -float(one.created_at))
        return [Request(str(one.request_id), str(one.status)) for one in mine]

    def why_failed(self, request: str) -> Failure:
        """Of a request that is over."""
        try:
            self._answer(request)
        except Exception as wrong:  # noqa: BLE001  # whatever it was, this is its text
            return Failure(_text(wrong), _is(wrong, _NO_ROOM))
        return Failure("")

    def abort(self, requests: Sequence[str]) -> None:
        """Requests that are under way."""
        with self._told_as_ours("abort requests"):
            self._answer(self._sky.api_cancel(list(requests), silent=True))

    def take_down(self, cluster: str) -> None:
        """With all that is on it; one that is not there stays so."""
        with self._told_as_ours("take a cluster down"):
            try:
                self._answer(self._sky.down(cluster))
            except Exception as wrong:
                if not _is(wrong, _NOT_THERE):
                    raise

    def printed_by_cluster(self, cluster: str, last: int) -> tuple[str, ...]:
        """The last lines of its task, which go with it; none of one that is not there, not yet,
        or does not answer."""
        with self._told_as_ours("tell what a cluster printed"):
            try:
                return self._printed(
                    last,
                    lambda to: self._sky.tail_logs(
                        cluster, job_id=None, follow=False, tail=last, output_stream=to
                    ),
                )
            except Exception as wrong:
                if not _is(wrong, _NOT_THERE, _NOT_UP, *_DUMB):
                    raise
                return ()

    # --- requests ----------------------------------------------------------------------------

    def wait(self, request: str) -> None:
        """Until the server has done it. Raises what it failed with."""
        with self._told_as_ours("do what it was asked for"):
            self._answer(request)

    @property
    def _sky(self) -> Any:
        """The SDK, which keeps the first address that it was told unless it is made to forget."""
        env.set_defaults({NO_LOCAL_SERVER: "1"})
        if not self._endpoint or env.lookup(ENDPOINT) == self._endpoint:
            return need("sky", extra="skypilot")
        sky, common = (need(name, extra="skypilot") for name in ("sky", "sky.server.common"))
        env.update({ENDPOINT: self._endpoint})
        common.get_server_url.cache_clear()
        common.is_api_server_local.cache_clear()
        return sky

    @property
    def _sdk(self) -> Any:
        """Where `sky` keeps what it does not export."""
        return self._sky and need("sky.client.sdk", extra="skypilot")

    def _task(self, body: Mapping[str, Any]) -> Any:
        return self._sky.Task.from_yaml_config(msgspec.json.decode(msgspec.json.encode(body)))

    def _printed(self, last: int, print_to: Callable[[io.StringIO], object]) -> tuple[str, ...]:
        """What comes in a minute: for a machine that was lost SkyPilot waits until it is back."""
        said = io.StringIO()
        with contextlib.suppress(_LateError):
            self._in_time("told what was printed", lambda: print_to(said), patience_s=_LISTEN_S)
        return tail(_COLOURS.sub("", said.getvalue()), last)

    def _answer(self, request: str) -> Any:
        """What the server has to say."""
        return self._in_time(
            f"done request {request}", lambda: self._sky.get(request), patience_s=self._patience_s
        )

    def _in_time(self, what: str, ask: Callable[[], Any], *, patience_s: float) -> Any:
        """What the server has to say, if it does so in time: the SDK itself waits for ever."""
        answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        context = contextvars.copy_context()

        def answer() -> None:
            try:
                answers.put((context.run(ask), None))
            except Exception as wrong:  # noqa: BLE001  # raised again by who waits
                answers.put((None, wrong))

        threading.Thread(target=answer, name="skypilot", daemon=True).start()
        try:
            told, wrong = answers.get(timeout=patience_s)
        except queue.Empty as late:
            raise _LateError(
                f"SkyPilot's API server has not {what} in {patience_s:.0f} s."
            ) from late
        if wrong is not None:
            raise wrong
        return told

    @contextlib.contextmanager
    def _told_as_ours(self, what: str) -> Iterator[None]:
        try:
            yield
        except SpotfitError:
            raise
        except Exception as wrong:
            error = complaint(what, wrong, endpoint=self._endpoint)
            if error is None:
                raise
            raise error from wrong


def complaint(
    what: str, wrong: Exception, *, endpoint: str = ""
) -> ProvisionError | MachineError | None:
    """What SkyPilot complained of; None for what may pass."""
    told = _text(wrong)
    refused = _is(wrong, "ConnectionError") and "refused" in told
    if refused or _is(wrong, *_NO_SERVER) or _NOT_STARTED in told:
        return _unreachable(endpoint, told)
    if _is(wrong, *_NO_ACCESS):
        return ProvisionPermissionError(
            f"SkyPilot may not {what}: {told}",
            do="`sky check` says which clouds it has access to; `sky api login` introduces you to "
            "an API server.",
        )
    if _is(wrong, *_NO_MACHINE):
        return ProvisionError(
            f"SkyPilot knows no such machine: {told}",
            do="Ask for less, or allow more places: SkyPilotOptions(infra=…, accelerator=…, "
            "spot=…); `sky show-gpus` lists what there is.",
        )
    if _is(wrong, *_MISTAKE):
        return ProvisionError(f"SkyPilot refused to {what}: {told}")
    return None


def _unreachable(endpoint: str, told: str) -> ProvisionError | MachineError:
    """On a machine that SkyPilot has rented a run must not end for it: others may reach it."""
    if env.lookup("SKYPILOT_TASK_ID") or endpoint:
        return MachineError(f"No SkyPilot API server answers: {told}")
    return ProvisionError(
        f"No SkyPilot API server answers: {told}",
        do="Start one here with `sky api start`, log in to one with `sky api login -e URL`, or set "
        "SkyPilotOptions(endpoint=URL). Machines need one that they reach, too, to ask for "
        "replacements.",
    )


def _is(wrong: Exception, *names: str) -> bool:
    """By its very name: the SDK's exceptions cannot be named where it is not installed, and
    relatives may mean something else: a cloud that does not answer is of the kind of one that has
    no machine."""
    return type(wrong).__name__ in names


def _nothing_to_look_after(wrong: Exception) -> bool:
    """Whether there is no jobs controller, or it has stopped. One in disorder may have jobs."""
    status = getattr(wrong, "cluster_status", None)
    return _is(wrong, _NOT_UP) and str(getattr(status, "value", status)) in ("None", "STOPPED")


def _text(wrong: Exception) -> str:
    return " ".join(_COLOURS.sub("", str(wrong)).split()) or type(wrong).__name__


def _job(told: Any) -> Job:
    reason, details = (str(text or "") for text in (told.failure_reason, told.details))
    why = reason if reason not in ("", "-") else details
    state = str(getattr(told.status, "value", told.status))
    return Job(int(told.job_id), str(told.job_name), state, why)


def _name_in(body: str) -> str:
    """Of the managed job that a request asks for."""
    with contextlib.suppress(msgspec.DecodeError):
        told = msgspec.json.decode(body)
        if isinstance(told, dict):
            return str(told.get("name") or "")
    return ""
