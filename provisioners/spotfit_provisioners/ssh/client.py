"""The ssh command, and its complaints in our words."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from spotfit.core.errors import MachineError, ProvisionError, ProvisionPermissionError
from spotfit_provisioners.ssh.options import SshOptions

_REFUSED = ("permission denied", "host key verification failed", "too many authentication")
_UNKNOWN = ("name or service not known", "nor servname", "bad configuration", "no such identity")
_STRANGER = "host key verification failed"
_SSH_FAILED = 255
_SCRIPT_S = 20
"""How long a script may take once its host has answered: most of it is waiting for another's."""


class Hosts:
    """Hosts that run a script each. It goes in by stdin, so that no command line shows it."""

    def __init__(self, options: SshOptions) -> None:
        self._options = options

    def run(self, host: str, script: str) -> str:
        """What the script prints there. Raises `ProvisionError` for what waiting does not cure,
        `MachineError` for a host that does not answer."""
        connect_s = int(self._options.connect_s)
        words = (found(), *self.words(), "-T", "--", host, "exec /bin/sh -s")
        try:
            done = subprocess.run(  # noqa: S603  # the user's own ssh, no shell here
                words,
                input=script,
                capture_output=True,
                text=True,
                timeout=connect_s + _SCRIPT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise MachineError(
                f"{host} has not answered within {connect_s + _SCRIPT_S} s."
            ) from late
        if done.returncode == 0:
            return done.stdout.strip()
        raise complaint(host, done.returncode, done.stderr)

    def words(self) -> Iterator[str]:
        """For ssh itself, before the host: here, and on the hosts as well."""
        options = self._options
        if options.config:
            yield from ("-F", options.config)
        yield "-oBatchMode=yes"
        yield f"-oConnectTimeout={int(options.connect_s)}"
        yield from ("-oServerAliveInterval=5", "-oServerAliveCountMax=3", "-oLogLevel=ERROR")
        if options.host_keys != "config":
            strict = "yes" if options.host_keys == "strict" else "accept-new"
            yield f"-oStrictHostKeyChecking={strict}"
        if options.known_hosts:
            yield f"-oUserKnownHostsFile={options.known_hosts}"


def complaint(host: str, code: int, message: str) -> ProvisionError | MachineError:
    """What ssh, or the script over there, complained of."""
    told = " ".join(message.split()) or f"exit code {code}"
    low = message.lower()
    if code == _SSH_FAILED and _STRANGER in low:
        return ProvisionPermissionError(
            f"The key of {host} is not the one we know, or none is known: {told}",
            do="Compare it with what `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` says "
            f"there, then put it into known_hosts: `ssh {host} true` once by hand, or "
            "SshOptions(host_keys='accept-new') for hosts never met before.",
        )
    if code == _SSH_FAILED and any(word in low for word in _REFUSED):
        return ProvisionPermissionError(
            f"{host} does not let us in: {told}",
            do=f"See to it that `ssh -o BatchMode=yes {host} true` works: nobody is there to be "
            "asked for a password.",
        )
    if code == _SSH_FAILED and any(word in low for word in _UNKNOWN):
        return ProvisionError(
            f"ssh does not know {host}: {told}",
            do="Correct SshOptions(hosts=…), or name it in ~/.ssh/config.",
        )
    if code == _SSH_FAILED:
        return MachineError(
            f"{host} does not answer: {told}",
            do=f"See to it that it is on, and that `ssh -o BatchMode=yes {host} true` works.",
        )
    return ProvisionError(
        f"{host} cannot start an agent: {told}",
        do="It needs Linux, /bin/sh, flock and setsid (util-linux), a folder that we may write to, "
        "and spotfit for its Python; `spotfit doctor --provisioner ssh` looks at all of it.",
    )


def found() -> str:
    """Path of the ssh command."""
    path = shutil.which("ssh")
    if path is None:
        raise ProvisionError(
            "There is no ssh on this machine's PATH.",
            do="Install OpenSSH's client, on the hosts, too: their agents ask for replacements.",
        )
    return path
