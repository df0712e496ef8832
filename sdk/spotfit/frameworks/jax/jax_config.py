"""JaxConfig and its framework: JAX's distributed runtime over all ranks of a round.

Rank 0's process runs JAX's coordinator at a new port in every round: no rank can connect to the
coordinator of an earlier round.
"""

from __future__ import annotations

import functools
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import suggest_keywords
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.frameworks.devices import worker_devices
from spotfit.frameworks.framework import AllGatherFn, call_in_thread, rank_environment
from spotfit.host import env, log
from spotfit.host.plugins import require_module
from spotfit.model.config import ScalingConfig
from spotfit.protocol.worker_agent import StartWorker

_PLATFORMS_VARIABLE = "JAX_PLATFORMS"
_PLATFORMS: Mapping[str, str] = {"cpu": "cpu", "cuda": "cuda,cpu", "tpu": "tpu,cpu"}
"""JAX's platforms by the device of the workers; the first one is the default of arrays."""
# All ranks have exchanged addresses just before: only their connections are left.
_INITIALIZATION_TIMEOUT_S = 300
# Agents detect lost workers and machines within seconds. JAX ends all processes after its own
# timeout, also if a process was only stopped: it must not be the first.
_HEARTBEAT_TIMEOUT_S = 600


@suggest_keywords
@dataclass
class JaxConfig(BackendConfig):
    """Configuration of JAX's distributed runtime, which is formed in every round.

    The platform follows from `ScalingConfig(use_gpu=..., use_tpu=...)`: the CPU without either.
    The fields are those of Ray Train, and select nothing else.
    """

    use_tpu: bool = False
    use_gpu: bool = False

    @property
    def framework(self) -> str:
        """The name under which workers look up the framework: "jax"."""
        return "jax"

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        """Return the framework's name and the workers' device: "cpu", "cuda" or "tpu".

        Raises `ConfigError` if a field contradicts `scaling`, or workers share a GPU.
        """
        for device in ("gpu", "tpu"):
            if getattr(self, f"use_{device}") and not getattr(scaling, f"use_{device}"):
                raise ConfigError(
                    f"JaxConfig(use_{device}=True) without ScalingConfig(use_{device}=True): the "
                    f"workers would have no {device.upper()}.",
                    do=f"Pass ScalingConfig(use_{device}=True), and omit jax_config.",
                )
        gpus = scaling.num_gpus_per_worker
        if gpus != int(gpus):
            raise ConfigError(
                f"JaxTrainer: workers with {gpus:g} GPU share a GPU, which JAX's collectives "
                "(NCCL) do not support.",
                do="Request whole GPUs in ScalingConfig(resources_per_worker={'GPU': ...}).",
            )
        if scaling.use_tpu:
            return self.framework, {"device": "tpu"}
        return self.framework, {"device": "cuda" if gpus else "cpu"}


class JaxOptions(msgspec.Struct, frozen=True):
    """What `JaxConfig.framework_options` returns, as a worker receives it."""

    device: str = "cpu"


class JaxFramework:
    """Framework for JAX: initializes `jax.distributed` with the world rank as process id."""

    preload_modules: tuple[str, ...] = (
        "numpy",
        "jax",
        "jax.numpy",
        "jax.experimental.multihost_utils",
        "spotfit.jax.checkpoint.pytree_checkpointer",
        "spotfit.jax.checkpoint.array_arena",
        "spotfit.jax.checkpoint.array_restore",
        "spotfit.jax.checkpoint.signed_collectives",
    )
    # NCCL copies between two GPUs of a node directly only if both are visible to the process.
    sees_peer_devices = True
    # JAX ends all processes if one leaves its shutdown barrier or ends before.
    leaves_together = True

    def __init__(self) -> None:
        self._has_group = False

    def environment(self, start: StartWorker) -> dict[str, str]:
        """Return torchrun's rank variables, the visible devices and JAX_PLATFORMS unless it is set.

        Raises `ConfigError` if the node has too few devices; see `rank_environment`.
        """
        platforms = env.lookup(_PLATFORMS_VARIABLE) or _PLATFORMS[_options(start).device]
        return {
            **rank_environment(start, sees_peer_devices=self.sees_peer_devices),
            _PLATFORMS_VARIABLE: platforms,
        }

    def form_group(self, start: StartWorker, all_gather: AllGatherFn) -> None:
        """Configure JAX and join the distributed runtime; a single worker needs none.

        Blocks until all ranks have joined. Compiled programs are cached in the run's directory on
        the node, unless the user has set a cache. Raises `MissingExtraError` without jax, JAX's
        RuntimeError if the training function's modules have used a device already or ranks cannot
        connect, and the exceptions of `all_gather`.
        """
        require_module("jax", extra="jax")
        import jax

        _configure(start)
        if start.world_size == 1:
            return
        address = _coordinator_address(start, all_gather)
        if _options(start).device == "cpu":
            _listen_for_gloo(start.host)
        jax.distributed.initialize(
            address,
            start.world_size,
            start.rank,
            local_device_ids=_own_gpus(start),
            # Slurm's variables describe the job of the machine, not these processes.
            cluster_detection_method="deactivate",
            # Only on the address that the other nodes use: the coordinator has no authentication.
            coordinator_bind_address=address,
            initialization_timeout=_INITIALIZATION_TIMEOUT_S,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=math.ceil(env.read(env.JAX_SHUTDOWN_TIMEOUT_S)),
        )
        self._has_group = True

    def leave_group(self) -> None:
        """Leave the distributed runtime, if there is one; wait for a limited time.

        At most JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S seconds; then a warning is logged.
        """
        if not self._has_group:
            return
        self._has_group = False
        timeout_s = env.read(env.JAX_SHUTDOWN_TIMEOUT_S)
        if not call_in_thread(_shut_down, timeout_s=timeout_s):
            log.warning("jax.leave_group.timeout", after_s=timeout_s)


def _options(start: StartWorker) -> JaxOptions:
    return msgspec.convert(start.framework_options, JaxOptions)


def _configure(start: StartWorker) -> None:
    import jax

    # Not by the environment: the fork server has imported jax, which read the variables then.
    jax.config.update("jax_platforms", env.lookup(_PLATFORMS_VARIABLE))
    if jax.config.jax_compilation_cache_dir is None:
        # Of this machine only: compiled programs use the instructions of its processor.
        jax.config.update("jax_compilation_cache_dir", str(Path(start.scratch_dir, "jax_cache")))
        # By default only programs that compile for a second: a restart compiles all of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _coordinator_address(start: StartWorker, all_gather: AllGatherFn) -> str:
    """Return rank 0's host with a port that was free there until now."""
    if start.rank != 0:
        return all_gather("jax_coordinator", b"")[0].decode()
    is_ipv6 = ":" in start.host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    # JAX binds the port itself: it is reserved until all ranks know it.
    with socket.create_server((start.host, 0), family=family) as reserved:
        host = f"[{start.host}]" if is_ipv6 else start.host
        address = f"{host}:{reserved.getsockname()[1]}"
        return all_gather("jax_coordinator", address.encode())[0].decode()


def _listen_for_gloo(host: str) -> None:
    """Let gloo, the collectives of CPU devices, listen at the node's own address.

    It would look up the name of the machine, which may map to an address that is unreachable.
    """
    # No option of JAX sets the address.
    try:
        from jax._src.lib import _jax

        make_collectives = _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError) as error:
        log.warning("jax.gloo_address_not_set", reason=str(error))
        return
    _jax.make_gloo_tcp_collectives = functools.partial(make_collectives, hostname=host)


def _own_gpus(start: StartWorker) -> list[int] | None:
    """Return the numbers of this worker's GPUs among those that it sees; None without GPUs."""
    devices = worker_devices(start, sees_peer_devices=JaxFramework.sees_peer_devices)
    gpus = [int(device.removeprefix("cuda:")) for device in devices if device.startswith("cuda:")]
    return gpus or None


def _shut_down() -> None:
    import jax

    try:
        jax.distributed.shutdown()
    except RuntimeError as error:
        log.warning("jax.leave_group.failed", reason=str(error).strip().splitlines()[0])
