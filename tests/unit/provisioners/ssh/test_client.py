"""What ssh complains of, in our words, and what its command line shows of us."""

from __future__ import annotations

from pathlib import Path

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
def test_what_waiting_does_not_cure_is_told_apart(
    code: int, message: str, error: type[SpotfitError]
) -> None:
    told = to_provision_error("h1", code, message)
    assert type(told) is error
    assert "h1" in str(told)
    assert message in str(told)


def test_a_key_that_is_not_the_known_one_is_told_with_how_to_compare_it() -> None:
    told = to_provision_error("h1", 255, "Host key verification failed.")
    assert "ssh-keygen -lf" in told.do


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of ours in ssh's place: it writes down how it was called and what it was given."""
    command = tmp_path / "ssh"
    command.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words; cat > {tmp_path}/script\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_a_script_goes_in_by_stdin_and_no_word_shows_it(ssh: Path) -> None:
    SshClient(SshOptions()).run_script("h1", "export SECRET=x")
    assert (ssh / "script").read_text() == "export SECRET=x"
    words = (ssh / "words").read_text()
    assert "SECRET" not in words
    assert words.endswith("-- h1 exec /bin/sh -s\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SshOptions(), "StrictHostKeyChecking=yes"),
        (SshOptions(host_key_checking="accept-new"), "StrictHostKeyChecking=accept-new"),
        (SshOptions(known_hosts="/lab/known"), "UserKnownHostsFile=/lab/known"),
        (SshOptions(config="/lab/config"), "-F /lab/config"),
    ],
)
def test_who_is_believed_to_be_the_host_is_told_to_ssh(
    ssh: Path, options: SshOptions, said: str
) -> None:
    SshClient(options).run_script("h1", "")
    assert said in (ssh / "words").read_text()


def test_the_configuration_decides_where_it_is_to(ssh: Path) -> None:
    SshClient(SshOptions(host_key_checking="config")).run_script("h1", "")
    assert "StrictHostKeyChecking" not in (ssh / "words").read_text()


def test_without_ssh_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProvisionError, match="command ssh") as told:
        SshClient(SshOptions()).run_script("h1", "")
    assert "OpenSSH" in told.value.do
