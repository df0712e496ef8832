"""LightGBMConfig and its framework: the network parameters with which LightGBM's ranks connect.

LightGBM forms its network when a `Booster` with these parameters is created, and binds its port
itself. The framework reserves a port on each rank and collects the addresses of all.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import suggest_keywords
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.frameworks.framework import AllGatherFn, rank_environment
from spotfit.host import log
from spotfit.host.plugins import require_module
from spotfit.protocol.worker_agent import StartWorker

_LOOPBACK = "127.0.0.1"
TREE_LEARNER_NAMES = ("tree_learner", "tree", "tree_type", "tree_learner_type")
"""The parameter `tree_learner` of LightGBM and its aliases."""


@suggest_keywords
@dataclass
class LightGBMConfig(BackendConfig):
    """Configuration of LightGBM's network, which has no settings."""

    @property
    def framework(self) -> str:
        """The name under which workers look up the framework: "lightgbm"."""
        return "lightgbm"


class LightGBMNetwork:
    """The network parameters of this process's round, and whether they were used."""

    def __init__(self, machines: Sequence[str], reserved: socket.socket) -> None:
        self._machines = tuple(machines)
        self._reserved = reserved
        self._port = int(reserved.getsockname()[1])
        self.was_requested = False
        """Whether `parameters` was called."""

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that every rank passes to LightGBM; a new dictionary.

        The first call releases the port, which LightGBM binds.
        """
        # As late as possible: until then no other process can take the port.
        self.was_requested = True
        self.release()
        return {
            "num_machines": len(self._machines),
            "local_listen_port": self._port,
            "machines": ",".join(self._machines),
        }

    def release(self) -> None:
        """Stop reserving the port. Idempotent."""
        self._reserved.close()


_networks: list[LightGBMNetwork] = []
"""The network of this worker's round: none or one."""


def current_network() -> LightGBMNetwork | None:
    """Return the network of this worker's round; None outside of a `LightGBMTrainer`'s worker."""
    return _networks[0] if _networks else None


def get_network_params() -> dict[str, Any]:
    """Return the parameters with which LightGBM's ranks connect, for `params` of its `train`.

    They are num_machines, local_listen_port and machines. Returns {} with a warning outside of the
    training function of a `LightGBMTrainer`. A distributed training also needs
    `tree_learner="data"`.
    """
    network = current_network()
    if network is None:
        log.warning(
            "lightgbm.no_network",
            text="get_network_params() is called outside of a LightGBMTrainer's training function: "
            "there are no network parameters",
        )
        return {}
    return network.parameters()


def check_is_distributed(params: Mapping[str, Any], *, world_size: int) -> None:
    """Raise `ConfigError` if each of several workers would train a model of its own.

    `params` are those of a training. LightGBM trains on the rows of one worker, without an error,
    if they lack the machines or a parallel tree learner.
    """
    if world_size == 1:
        return
    learner = next((params[name] for name in TREE_LEARNER_NAMES if name in params), "serial")
    # `num_machines` alone: the network parameters of later segments have no machines.
    if int(params.get("num_machines", params.get("num_machine", 1))) == world_size and (
        learner != "serial"
    ):
        return
    raise ConfigError(
        f"Each of the {world_size} workers would train a LightGBM model of its own rows: params "
        "has not the network parameters or a parallel tree_learner.",
        do='Pass params={**params, **get_network_params(), "tree_learner": "data", '
        '"pre_partition": True}, or use spotfit.lightgbm.train, which adds them.',
        retryable=False,
    )


class LightGBMFramework:
    """Framework for LightGBM: provides `get_network_params` in the workers of a round."""

    preload_modules: tuple[str, ...] = ("numpy", "lightgbm", "spotfit.lightgbm.segmented_lightgbm")
    sees_peer_devices = False
    leaves_together = False

    def __init__(self) -> None:
        self._world_size = 1

    def environment(self, start: StartWorker) -> dict[str, str]:
        """Return torchrun's rank variables and the visible devices, for the worker to set.

        Raises `ConfigError` if the node has too few devices; see `rank_environment`.
        """
        return rank_environment(start, sees_peer_devices=self.sees_peer_devices)

    def form_group(self, start: StartWorker, all_gather: AllGatherFn) -> None:
        """Reserve a port of this rank and exchange the addresses of all ranks.

        LightGBM itself connects later. Raises `MissingExtraError` without lightgbm, `ConfigError`
        if no network interface has this node's address, and the exceptions of `all_gather`.
        """
        require_module("lightgbm", extra="lightgbm")
        _check_own_address(start.host)
        reserved = _reserve_port()
        address = f"{start.host}:{reserved.getsockname()[1]}"
        gathered = all_gather("lightgbm_machines", address.encode())
        machines = machine_list([one.decode() for one in gathered])
        _networks[:] = [LightGBMNetwork(machines, reserved)]
        self._world_size = start.world_size

    def leave_group(self) -> None:
        """Warn if several workers have not used the network; LightGBM closes it by itself."""
        network = current_network()
        if network is None:
            return
        _networks.clear()
        network.release()
        if self._world_size > 1 and not network.was_requested:
            log.warning(
                "lightgbm.network_unused",
                text=f"the {self._world_size} workers have not called get_network_params(): "
                "probably each has trained a model of its own rows",
                do="use spotfit.lightgbm.train, or pass **get_network_params() and "
                "tree_learner='data' to lightgbm.train",
            )


def machine_list(addresses: Sequence[str]) -> list[str]:
    """Return the machines for LightGBM from all ranks' "host:port".

    LightGBM compares them with the addresses of its network interfaces, of which the loopback one
    has only 127.0.0.1: so all loopback addresses are replaced by that.
    """
    hosts = [address.rpartition(":") for address in addresses]
    if not all(_is_loopback(host) for host, _, _ in hosts):
        return list(addresses)
    return [f"{_LOOPBACK}:{port}" for _, _, port in hosts]


def _reserve_port() -> socket.socket:
    """Return a socket with a new port that does not listen.

    A rank that is early must be refused, and connects again: on a socket that listens it would be
    connected to this process instead of LightGBM, and wait forever.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # LightGBM listens on all addresses: the port must be free on each.
    reserved.bind(("", 0))
    return reserved


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_own_address(host: str) -> None:
    if ":" in host:
        raise ConfigError(
            f"This machine has the address {host}; LightGBM connects over IPv4 only.",
            do="Use machines with IPv4 addresses.",
        )
    try:
        socket.create_server((host, 0)).close()
    except OSError as error:
        raise ConfigError(
            f"No network interface of this machine has its address {host}, under which the other "
            "machines reach it; LightGBM finds its own rank by the addresses of its interfaces.",
            do="Use machines without address translation (NAT) between them.",
        ) from error
