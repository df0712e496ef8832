"""SkyPilot's complaints in our words; the calls themselves are tried by `make sky-api`."""

from __future__ import annotations

import builtins
import threading

import pytest

from spotfit.core.errors import (
    InfrastructureError,
    MissingExtraError,
    ProvisionError,
    ProvisionPermissionError,
    SpotfitError,
)
from spotfit_provisioners.skypilot import client
from spotfit_provisioners.skypilot.client import SkyPilotClient, SkyPilotRequest, to_provision_error


def theirs(name: str, message: str = "what they say") -> Exception:
    """An exception of that name: theirs are told by nothing else."""
    kind = getattr(builtins, name, None) or type(name, (Exception,), {})
    wrong = kind(message)
    assert isinstance(wrong, Exception)
    return wrong


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ApiServerAuthenticationError", ProvisionPermissionError),
        ("NoCloudAccessError", ProvisionPermissionError),
        ("PermissionDeniedError", ProvisionPermissionError),
        ("ResourcesUnavailableError", ProvisionError),
        ("APIVersionMismatchError", ProvisionError),
        ("ValueError", ProvisionError),
    ],
)
def test_what_waiting_does_not_cure_is_told_apart(name: str, error: type[SpotfitError]) -> None:
    told = to_provision_error("do it", theirs(name))
    assert type(told) is error
    assert "what they say" in str(told)


@pytest.mark.parametrize(
    "name",
    ["KubeAPIUnreachableError", "ServerTemporarilyUnavailableError", "CommandError", "OSError"],
)
def test_what_may_pass_is_left_to_be_asked_again(name: str) -> None:
    assert to_provision_error("do it", theirs(name)) is None


NO_SERVER = theirs("ApiServerConnectionError", "Could not connect")


def test_without_an_api_server_it_says_how_to_get_one() -> None:
    told = to_provision_error("do it", NO_SERVER)
    assert type(told) is ProvisionError
    assert "sky api start" in told.do
    assert "endpoint=" in told.do
    assert (
        to_provision_error("do it", theirs("RuntimeError", client._LOCAL_SERVER_DISABLED))
        is not None
    )
    assert to_provision_error("do it", theirs("ConnectionError", "Connection refused")) is not None
    assert to_provision_error("do it", theirs("ConnectionError", "reset by peer")) is None


def test_a_server_elsewhere_may_come_back() -> None:
    assert (
        type(to_provision_error("do it", NO_SERVER, endpoint="https://sky")) is InfrastructureError
    )


def test_a_machine_without_a_way_to_the_server_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_TASK_ID", "sky-managed-1")
    assert type(to_provision_error("do it", NO_SERVER)) is InfrastructureError


def test_colours_and_lines_are_taken_out_of_what_they_say() -> None:
    told = to_provision_error("do it", theirs("ValueError", "\x1b[31mno\n  such\x1b[0m thing"))
    assert told is not None
    assert "no such thing" in told.message


@pytest.mark.parametrize(
    "name",
    [
        *client._PERMISSION_ERRORS,
        *client._NO_MACHINE_ERRORS,
        *client._CONNECTION_ERRORS,
        *client._CLIENT_ERRORS,
        client._CLUSTER_NOT_UP_ERROR,
        client._CLUSTER_MISSING_ERROR,
        *client._UNRESPONSIVE_ERRORS,
    ],
)
def test_the_names_are_theirs(name: str) -> None:
    """They are known by name only, and a name that nobody has any more would go unnoticed."""
    exceptions = pytest.importorskip("sky.exceptions", reason="SkyPilot is not installed")
    assert hasattr(exceptions, name) or hasattr(builtins, name)


@pytest.mark.parametrize(
    ("status", "nothing"), [(None, True), ("STOPPED", True), ("INIT", False), ("UP", False)]
)
def test_a_controller_in_disorder_is_not_taken_for_one_without_jobs(
    status: str | None, nothing: bool
) -> None:
    wrong = theirs(client._CLUSTER_NOT_UP_ERROR)
    wrong.cluster_status = status  # type: ignore[attr-defined]
    assert client._has_no_controller(wrong) is nothing


def test_a_launch_is_found_by_what_it_asks_for() -> None:
    assert client._requested_job_name('{"name": "t-1-0", "task": "…"}') == "t-1-0"
    assert client._requested_job_name("null") == ""
    assert client._requested_job_name("") == ""


def test_a_request_is_under_way_until_it_is_over() -> None:
    assert SkyPilotRequest("r", "WAITING").is_pending
    assert not SkyPilotRequest("r", "FAILED").is_pending


def test_the_last_lines_are_told_without_their_colours() -> None:
    told = SkyPilotClient("", request_timeout_s=1.0)._read_log(
        2, lambda to: to.write("one\n\x1b[36mtwo\x1b[0m\nthree\n")
    )
    assert told == ("two", "three")


def test_nobody_waits_for_lines_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before is told: here it may be nothing yet."""
    monkeypatch.setattr(client, "_LOG_TIMEOUT_S", 0.0)
    for_ever = threading.Event()
    try:
        assert (
            SkyPilotClient("", request_timeout_s=1.0)._read_log(2, lambda _: for_ever.wait()) == ()
        )
    finally:
        for_ever.set()


def test_without_the_extra_it_says_what_to_install() -> None:
    try:
        import sky  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError) as told:
            SkyPilotClient("", request_timeout_s=1.0).describe_server()
        assert "spotfit[skypilot]" in told.value.do
    else:
        pytest.skip("SkyPilot is installed")
