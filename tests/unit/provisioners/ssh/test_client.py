"""Translation of ssh errors, and the command line of ssh."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import (
    InfrastructureError,
    ProvisionError,
    ProvisionPermissionError,
    SpotfitError,
)
from spotfit_provisioners.ssh.client import SshClient, to_provision_error
from spotfit_provisioners.ssh.options import SshOptions


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        (255, "me@h1: Permission denied (publickey).", ProvisionPermissionError),
        (255, "Received disconnect: Too many authentication failures", ProvisionPermissionError),
        (255, "Host key verification failed.", ProvisionPermissionError),
        (255, "ssh: Could not resolve hostname h1: Name or service not known", ProvisionError),
        (255, "/etc/ssh/ssh_config: line 3: Bad configuration option: x", ProvisionError),
        (255, "ssh: Could not resolve hostname h1: Temporary failure in name", InfrastructureError),
        (255, "ssh: connect to host h1 port 22: Connection refused", InfrastructureError),
        (255, "ssh: connect to host h1 port 22: Connection timed out", InfrastructureError),
        (255, "kex_exchange_identification: Connection closed by remote host", InfrastructureError),
        (255, "", InfrastructureError),
        (1, "mkdir: cannot create directory: No space left on device", ProvisionError),
    ],
)
def test_permanent_errors_are_distinguished(
    code: int, message: str, error: type[SpotfitError]
) -> None:
    result = to_provision_error("h1", code, message)
    assert type(result) is error
    assert "h1" in str(result)
    assert message in str(result)


def test_changed_host_key_is_reported_with_a_remedy() -> None:
    result = to_provision_error("h1", 255, "Host key verification failed.")
    assert "ssh-keygen -lf" in result.do


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake ssh command that records its arguments and input."""
    command = tmp_path / "ssh"
    command.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments; cat > {tmp_path}/script\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_script_is_passed_by_stdin_only(ssh: Path) -> None:
    SshClient(SshOptions()).run_script("h1", "export SECRET=x")
    assert (ssh / "script").read_text() == "export SECRET=x"
    arguments = (ssh / "arguments").read_text()
    assert "SECRET" not in arguments
    assert arguments.endswith("-- h1 exec /bin/sh -s\n")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SshOptions(), "StrictHostKeyChecking=yes"),
        (SshOptions(host_key_checking="accept-new"), "StrictHostKeyChecking=accept-new"),
        (SshOptions(known_hosts="/lab/known"), "UserKnownHostsFile=/lab/known"),
        (SshOptions(config="/lab/config"), "-F /lab/config"),
    ],
)
def test_host_key_checking_is_passed_to_ssh(ssh: Path, options: SshOptions, expected: str) -> None:
    SshClient(options).run_script("h1", "")
    assert expected in (ssh / "arguments").read_text()


def test_host_key_options_follow_the_configuration(ssh: Path) -> None:
    SshClient(SshOptions(host_key_checking="config")).run_script("h1", "")
    assert "StrictHostKeyChecking" not in (ssh / "arguments").read_text()


def test_missing_ssh_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProvisionError, match="command ssh") as error_info:
        SshClient(SshOptions()).run_script("h1", "")
    assert "OpenSSH" in error_info.value.do


def test_a_script_is_written_as_bytes_so_that_windows_keeps_its_line_ends(
    ssh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, inputs = subprocess.run, []

    def record(*arguments: Any, **options: Any) -> Any:
        inputs.append(options["input"])
        return run(*arguments, **options)

    monkeypatch.setattr(subprocess, "run", record)
    SshClient(SshOptions()).run_script("h1", "a\nb\n")
    assert inputs == [b"a\nb\n"]
