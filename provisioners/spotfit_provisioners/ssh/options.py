"""Options of the SSH backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import check_minimums
from spotfit_provisioners.prices.given import ANY_TYPE, check_prices


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """Linux hosts with OpenSSH, a shell and Python. Each host runs one agent at a time."""

    provisioner: ClassVar[str] = "ssh"

    hosts: tuple[str, ...] = ()
    """Hosts in `ssh` syntax: names of ~/.ssh/config, addresses, 'user@host'; earlier ones are
    preferred. The hosts must reach each other by these names, because agents submit
    replacements."""
    config: str = ""
    """Path of an ssh configuration file on every machine; '' is the user's own."""
    host_key_checking: Literal["strict", "accept-new", "config"] = "strict"
    """Verification of host keys: 'strict' accepts only keys in known_hosts; 'accept-new' adds keys
    of new hosts; 'config' uses the ssh configuration. The first two reject changed keys. An
    accepted host receives the run key."""
    known_hosts: str = ""
    """Path of the known_hosts file on every machine; '' uses the ssh configuration."""
    workers_per_node: int = 1
    """Number of workers per host."""
    setup: tuple[str, ...] = ()
    """Shell lines to run before an agent starts: '. /opt/venv/bin/activate'."""
    command_prefix: str = ""
    """Command that runs the agent: 'apptainer exec --nv /shared/spotfit.sif'."""
    python: str = "python"
    """The interpreter on the hosts or in the container."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the agents. Must not contain secrets: they are stored unencrypted
    with the run."""
    state_dir: str = ".spotfit/ssh"
    """Directory on the hosts for the state and output of agents, relative to the home directory."""
    availability_command: str = ""
    """Shell command; a host is used only if it succeeds. For hosts shared with other users:
    '! nvidia-smi --query-compute-apps=pid --format=csv,noheader | grep -q .'."""
    prices: dict[str, Any] = field(default_factory=dict)
    """Price of a host in US dollars per hour: {'*': {'on_demand': 1.5}}; 0 is a valid price."""
    grace_s: float = 30.0
    """Time between SIGTERM and SIGKILL of a cancelled agent, in seconds."""
    connect_timeout_s: float = 10.0
    """Time limit for connecting to a host, in seconds."""

    def __post_init__(self) -> None:
        check_prices(self.prices, option="SshOptions(prices=…)", types=(ANY_TYPE,))
        check_minimums(self, workers_per_node=1, connect_timeout_s=1, grace_s=0)
        if duplicates := {host for host in self.hosts if self.hosts.count(host) > 1}:
            raise ConfigError(
                f"SshOptions(hosts) contains {', '.join(sorted(duplicates))} more than once.",
                do="Write each host once; workers_per_node sets the number of workers of a host.",
            )
        if invalid := [host for host in self.hosts if not host.strip() or host.startswith("-")]:
            raise ConfigError(
                f"SshOptions(hosts): {invalid[0]!r} is empty or starts with '-'.",
                do="Write hosts as for `ssh`: 'gpu1', '10.0.0.5' or 'user@gpu1'.",
            )
        if invalid := [name for name in self.environment if not name.isidentifier()]:
            raise ConfigError(
                f"SshOptions(environment): {invalid[0]!r} is not a valid variable name.",
                do="Use letters, digits and '_', and no digit at the start.",
            )
        if self.host_key_checking not in ("strict", "accept-new", "config"):
            raise ConfigError(
                f"SshOptions(host_key_checking={self.host_key_checking!r}) is not a valid choice.",
                do="Set it to 'strict', 'accept-new' or 'config'; 'strict' is the default.",
            )
