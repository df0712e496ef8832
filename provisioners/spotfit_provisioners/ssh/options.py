"""What can be chosen of machines that one reaches by ssh."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from spotfit.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """Linux hosts with OpenSSH, a shell and Python. Each holds one agent at a time."""

    provisioner: ClassVar[str] = "ssh"

    hosts: tuple[str, ...] = ()
    """As `ssh` takes them: names of ~/.ssh/config, addresses, 'user@host'. The hosts must reach
    each other by these names, too: agents ask for replacements. Those named first are taken
    first."""
    config: str = ""
    """Path of an ssh configuration, on every machine; '' is the user's own."""
    host_keys: Literal["strict", "accept-new", "config"] = "strict"
    """Whom we believe to be the host: 'strict' only who stands in known_hosts; 'accept-new' also
    who was never met before, and notes it there; 'config' leaves it to the ssh configuration.
    A key that has changed is refused by the first two. Whoever is let in gets the run's key."""
    known_hosts: str = ""
    """Path of the file of host keys, on every machine; '' leaves it to the ssh configuration."""
    workers_per_node: int = 1
    """How many workers share a host."""
    setup: tuple[str, ...] = ()
    """Lines of shell before an agent starts: '. /opt/venv/bin/activate'."""
    container: str = ""
    """A command to run the agent by: 'apptainer exec --nv /shared/spotfit.sif'."""
    python: str = "python"
    """The interpreter, on the hosts or in the container."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the agents. No secrets: whoever may look at the run can read them."""
    folder: str = ".spotfit/ssh"
    """Where hosts note what runs, and keep what agents print; below the home there, unless it
    begins with '/'."""
    free_if: str = ""
    """A command of shell: a host is taken only where it succeeds. Hosts that others use as well:
    '! nvidia-smi --query-compute-apps=pid --format=csv,noheader | grep -q .'."""
    grace_s: float = 30.0
    """How long an agent has between SIGTERM and SIGKILL when it is let go."""
    connect_s: float = 10.0
    """How long a host may take to answer."""

    def __post_init__(self) -> None:
        if self.workers_per_node < 1:
            raise ConfigError("SshOptions(workers_per_node) must be at least 1.")
        if self.connect_s < 1 or self.grace_s < 0:
            raise ConfigError("SshOptions: connect_s is at least 1, grace_s not below zero.")
        if len(set(self.hosts)) < len(self.hosts):
            raise ConfigError("SshOptions(hosts) names a host twice.")
        if wrong := [host for host in self.hosts if not host.strip() or host.startswith("-")]:
            raise ConfigError(f"SshOptions(hosts) holds {wrong[0]!r}, which is no host.")
        if wrong := [name for name in self.environment if not name.isidentifier()]:
            raise ConfigError(f"SshOptions(environment) names {wrong[0]!r}: no variable's name.")
        if self.host_keys not in ("strict", "accept-new", "config"):
            raise ConfigError(
                f"SshOptions(host_keys={self.host_keys!r}) is none of 'strict', 'accept-new' and "
                "'config'."
            )
