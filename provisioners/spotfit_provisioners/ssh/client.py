"""Calls of the ssh command, and translation of its errors."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from spotfit.core.errors import InfrastructureError, ProvisionError, ProvisionPermissionError
from spotfit.host import machine
from spotfit_provisioners.ssh.options import SshOptions

# ssh reports all its own errors with exit code 255; only their text distinguishes them.
_ACCESS_DENIED_WORDS = (
    "permission denied",
    "host key verification failed",
    "too many authentication",
)
_UNKNOWN_HOST_WORDS = (
    "name or service not known",
    "nor servname",
    "bad configuration",
    "no such identity",
)
_HOST_KEY_FAILURE = "host key verification failed"
_SSH_ERROR_CODE = 255
# Time limit of a script after the connection, mostly spent waiting for the lock of the host.
_SCRIPT_TIMEOUT_S = 20


class SshClient:
    """Runs shell scripts on hosts, passed on stdin because command lines are public."""

    def __init__(self, options: SshOptions) -> None:
        self._options = options

    def run_script(self, host: str, script: str) -> str:
        """Run the script on the host and return its output.

        Raises `ProvisionError` for permanent errors, `InfrastructureError` if the host does not
        answer.
        """
        connect_s = int(self._options.connect_timeout_s)
        command = (find_ssh(), *self.ssh_arguments(), "-T", "--", host, "exec /bin/sh -s")
        try:
            done = subprocess.run(  # noqa: S603  # the user's own ssh, no local shell
                command,
                # Bytes: as text, Windows would end the lines with CRLF, which no shell reads.
                input=script.encode(),
                capture_output=True,
                timeout=connect_s + _SCRIPT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise InfrastructureError(
                f"The host {host} did not answer within {connect_s + _SCRIPT_TIMEOUT_S} s.",
                do=f"Check that it is running, and that `ssh -o BatchMode=yes {host} true` works.",
            ) from late
        if done.returncode == 0:
            return done.stdout.decode(errors="replace").strip()
        raise to_provision_error(host, done.returncode, done.stderr.decode(errors="replace"))

    def ssh_arguments(self) -> Iterator[str]:
        """Yield the ssh options, which are the same here and on the hosts."""
        options = self._options
        if options.config:
            yield from ("-F", options.config)
        yield "-oBatchMode=yes"  # never ask for a password or a confirmation
        yield f"-oConnectTimeout={int(options.connect_timeout_s)}"
        # A connection without an answer ends after 15 s; otherwise it would wait for TCP's timeout.
        yield from ("-oServerAliveInterval=5", "-oServerAliveCountMax=3", "-oLogLevel=ERROR")
        if options.host_key_checking != "config":
            strict = "yes" if options.host_key_checking == "strict" else "accept-new"
            yield f"-oStrictHostKeyChecking={strict}"
        if options.known_hosts:
            yield f"-oUserKnownHostsFile={options.known_hosts}"


def to_provision_error(host: str, code: int, message: str) -> ProvisionError | InfrastructureError:
    """Translate an error of ssh, or of the script on the host."""
    text = " ".join(message.split()) or f"exit code {code}"
    low = message.lower()
    if code == _SSH_ERROR_CODE and _HOST_KEY_FAILURE in low:
        problem = "has changed" if "has changed" in low else "is not in known_hosts"
        return ProvisionPermissionError(
            f"The host key of {host} {problem}: {text}",
            do="Compare the key with the output of `ssh-keygen -lf "
            "/etc/ssh/ssh_host_ed25519_key.pub` on the host, then add it to known_hosts with "
            f"`ssh {host} true`, or set SshOptions(host_key_checking='accept-new') for new hosts.",
        )
    if code == _SSH_ERROR_CODE and any(word in low for word in _ACCESS_DENIED_WORDS):
        return ProvisionPermissionError(
            f"The host {host} denied access: {text}",
            do=f"Set up a key or agent until `ssh -o BatchMode=yes {host} true` works; passwords "
            "cannot be entered.",
        )
    if code == _SSH_ERROR_CODE and any(word in low for word in _UNKNOWN_HOST_WORDS):
        return ProvisionError(
            f"ssh cannot resolve the host name {host}: {text}",
            do="Correct SshOptions(hosts=…), or define the host in ~/.ssh/config.",
        )
    # Any other error of ssh may be one of the network, which may recover.
    if code == _SSH_ERROR_CODE:
        return InfrastructureError(
            f"The host {host} does not answer: {text}",
            do=f"Check that it is running, and that `ssh -o BatchMode=yes {host} true` works.",
        )
    return ProvisionError(
        f"The host {host} cannot start an agent: {text}",
        do="The host needs Linux, /bin/sh, flock and setsid (util-linux), a writable directory, "
        "and a Python with spotfit; `spotfit doctor --provisioner ssh` checks all of them.",
    )


def find_ssh() -> str:
    """Return the path of the ssh command. Raises `ProvisionError` if it is missing."""
    path = shutil.which("ssh")
    if path is None:
        raise ProvisionError(
            f"The command ssh is not on the PATH of {machine.hostname()}.",
            do="Install the OpenSSH client on that computer and on the hosts, because agents "
            "submit replacements.",
        )
    return path
