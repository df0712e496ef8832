"""Translation of SkyPilot's errors; `make sky-api` tests the calls."""

from __future__ import annotations

import builtins
import threading
from types import SimpleNamespace

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


def sky_error(name: str, message: str = "what they say") -> Exception:
    """An exception class with this name; SkyPilot's exceptions are recognized by name."""
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
def test_permanent_errors_are_distinguished(name: str, error: type[SpotfitError]) -> None:
    result = to_provision_error("do it", sky_error(name))
    assert type(result) is error
    assert "what they say" in str(result)


@pytest.mark.parametrize(
    "name",
    ["KubeAPIUnreachableError", "ServerTemporarilyUnavailableError", "CommandError", "OSError"],
)
def test_transient_errors_are_retryable(name: str) -> None:
    assert to_provision_error("do it", sky_error(name)) is None


NO_SERVER = sky_error("ApiServerConnectionError", "Could not connect")


def test_missing_api_server_names_the_command() -> None:
    result = to_provision_error("do it", NO_SERVER)
    assert type(result) is ProvisionError
    assert "sky api start" in result.do
    assert "endpoint=" in result.do
    assert (
        to_provision_error("do it", sky_error("RuntimeError", client._LOCAL_SERVER_DISABLED))
        is not None
    )
    assert (
        to_provision_error("do it", sky_error("ConnectionError", "Connection refused")) is not None
    )
    assert to_provision_error("do it", sky_error("ConnectionError", "reset by peer")) is None


def test_unreachable_remote_server_is_transient() -> None:
    assert (
        type(to_provision_error("do it", NO_SERVER, endpoint="https://sky")) is InfrastructureError
    )


def test_unreachable_server_from_a_machine_is_transient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_TASK_ID", "sky-managed-1")
    assert type(to_provision_error("do it", NO_SERVER)) is InfrastructureError


def test_messages_are_stripped_of_colours_and_newlines() -> None:
    result = to_provision_error("do it", sky_error("ValueError", "\x1b[31mno\n  such\x1b[0m thing"))
    assert result is not None
    assert "no such thing" in result.message


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
def test_names_match_skypilot(name: str) -> None:
    """Exceptions are matched by name, so a removed name would go unnoticed."""
    exceptions = pytest.importorskip(
        "sky.exceptions", reason="SkyPilot is not installed; `make sky-api`"
    )
    assert hasattr(exceptions, name) or hasattr(builtins, name)


@pytest.mark.parametrize(
    ("status", "nothing"), [(None, True), ("STOPPED", True), ("INIT", False), ("UP", False)]
)
def test_failed_controller_is_not_an_empty_queue(status: str | None, nothing: bool) -> None:
    wrong = sky_error(client._CLUSTER_NOT_UP_ERROR)
    wrong.cluster_status = status  # type: ignore[attr-defined]
    assert client._has_no_controller(wrong) is nothing


def test_job_name_is_read_from_a_launch_request() -> None:
    assert client._requested_job_name('{"name": "t-1-0", "task": "…"}') == "t-1-0"
    assert client._requested_job_name("null") == ""
    assert client._requested_job_name("") == ""


def test_request_is_pending_until_it_ends() -> None:
    assert SkyPilotRequest("r", "WAITING").is_pending
    assert not SkyPilotRequest("r", "FAILED").is_pending


def test_last_output_lines_have_no_colours() -> None:
    result = SkyPilotClient("", request_timeout_s=1.0)._read_log(
        2, lambda to: to.write("one\n\x1b[36mtwo\x1b[0m\nthree\n")
    )
    assert result == ("two", "three")


def test_reading_output_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines before the timeout are returned; here there are none."""
    monkeypatch.setattr(client, "_LOG_TIMEOUT_S", 0.0)
    never_set = threading.Event()
    try:
        assert (
            SkyPilotClient("", request_timeout_s=1.0)._read_log(2, lambda _: never_set.wait()) == ()
        )
    finally:
        never_set.set()


def test_usage_is_the_last_interval_of_the_newest_cluster_of_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records as those of `sky.cost_report` in SkyPilot 0.14.1, the newest first."""
    records = [
        {"name": "t-1-0", "launched_at": 170, "usage_intervals": [[100, 120], [150, None]]},
        {"name": "t-1-0", "launched_at": 70, "usage_intervals": [[60, 80]]},
        {"name": "t-1-1", "launched_at": None, "usage_intervals": None},
        {"name": "of-a-colleague", "launched_at": 90, "usage_intervals": [[90, None]]},
    ]
    sdk = SimpleNamespace(cost_report=lambda days: f"request-{days}", get=lambda _: records)
    monkeypatch.setattr(SkyPilotClient, "_sky", sdk)
    usage = SkyPilotClient("", request_timeout_s=5.0).cluster_usage(["t-1-0", "t-1-1"])
    assert usage == {"t-1-0": (150, None)}


def test_missing_extra_names_the_package() -> None:
    try:
        import sky  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError) as error_info:
            SkyPilotClient("", request_timeout_s=1.0).describe_server()
        assert "spotfit[skypilot]" in error_info.value.do
    else:
        pytest.skip("SkyPilot is installed")
