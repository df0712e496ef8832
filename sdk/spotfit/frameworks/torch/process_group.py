"""TorchFramework: the default process group of `torch.distributed`, formed in every round.

Rank 0 opens a new port per round and broadcasts it, so that no rank can connect to the store of
an earlier round. All ranks then join a TCPStore at that port.
"""

from __future__ import annotations

import datetime
import importlib
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.frameworks.devices import worker_devices
from spotfit.frameworks.framework import AllGatherFn, call_in_thread, rank_environment
from spotfit.frameworks.torch.lightning_check import check_trainers_at_fit
from spotfit.frameworks.torch.torch_config import default_backend
from spotfit.host import env, log, machine
from spotfit.host.plugins import require_module
from spotfit.protocol.worker_agent import StartWorker

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported in fact

# All ranks connect to rank 0's store at the same moment; a full backlog would drop some of them.
_BACKLOG = 4096
_TPU_BACKEND = default_backend(gpu=False, tpu=True)


class TorchOptions(msgspec.Struct, frozen=True):
    """The fields of `TorchConfig`, as a worker receives them."""

    backend: str = "gloo"
    init_method: str = "env"
    timeout_s: float = 1800
    form_group: bool = True


class TorchFramework:
    """Framework for torch: forms the default process group over all ranks."""

    _rendezvous: TCPStore | None = None
    """The store at which the function forms the group itself; rank 0 serves it."""

    preload_modules: tuple[str, ...] = (
        "torch",
        "torch.distributed",
        "torch.nn.parallel",
        "torch.utils.data",
        "cloudpickle",
        # What DDP and the first optimizer import when they are created.
        "torch._dynamo",
        "torch._functorch._aot_autograd.descriptors",
        "torch._inductor.utils",
        "torch.fx.experimental.symbolic_shapes",
        "torch.distributed._functional_collectives",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.utils.serialization.config",
        "spotfit.torch.checkpoint.checkpointer",
        "spotfit.torch.checkpoint.tensor_arena",
        "spotfit.torch.checkpoint.data_position",
        "spotfit.torch.checkpoint.load_plan",
        "spotfit.torch.checkpoint.optimizer_alloc",
        "spotfit.torch.checkpoint.deferred_init",
    )
    # NCCL copies between two GPUs of a node directly only if both are visible to the process.
    sees_peer_devices = True

    @property
    def leaves_together(self) -> bool:
        """Whether the function has formed the group: at a store that ends with rank 0's process."""
        return self._rendezvous is not None

    def environment(self, start: StartWorker) -> dict[str, str]:
        """Return torchrun's rank variables, visible devices, MASTER_ADDR and Accelerate's device.

        MASTER_ADDR is this node's own address until `form_group` sets rank 0's. Raises
        `ConfigError` if the node has too few devices.
        """
        return {
            **rank_environment(start, sees_peer_devices=self.sees_peer_devices),
            "MASTER_ADDR": start.host,
            "ACCELERATE_TORCH_DEVICE": _default_device(start),
        }

    def form_group(self, start: StartWorker, all_gather: AllGatherFn) -> None:
        """Set the CPU threads, network interface and device of this rank and join the group.

        Blocks until all ranks have joined; torch waits for at most the `timeout_s` of
        `TorchConfig`. With `TorchConfig(form_group=False)` the rank does not join, and has the
        variables with which `init_process_group()` joins. Also sets MASTER_ADDR and MASTER_PORT of
        this process to rank 0's. Raises `MissingExtraError` without torch, `ConfigError` if a
        worker with a GPU has a torch without CUDA, torch's exceptions and those of `all_gather`.

        With several workers in a group, Lightning's `Trainer.fit` will raise
        `UnpreparedTrainerError` if it would train one model per worker.
        """
        # A clear error instead of an ImportError if the machine's image has no torch.
        require_module("torch", extra="torch")
        import torch

        options = torch_options(start)
        # Set explicitly: the fork server has imported torch, which read the variable then.
        threads = env.lookup("OMP_NUM_THREADS") or ""
        is_valid = threads.isdecimal() and int(threads) > 0
        torch.set_num_threads(int(threads) if is_valid else machine.cpu_count())
        # By default gloo resolves the host name, which may map to an unreachable address.
        if interface := machine.interface_with_address(start.host):
            env.set_defaults({"GLOO_SOCKET_IFNAME": interface})
        if options.backend == _TPU_BACKEND:  # its own package registers it when it is loaded
            import_optional(
                "torch_tpu._loader",
                package="torch_tpu",
                needed_by="TorchConfig(backend='tpu_dist'), the default with use_tpu=True,",
            ).load()
        if (device := _default_device(start)).startswith("cuda"):
            _require_cuda_build()
            torch.cuda.set_device(device)
        if options.form_group:
            init_default_group(options.backend, start, all_gather)
            if start.world_size > 1:
                check_trainers_at_fit(start.world_size)
        else:
            self._rendezvous = _rendezvous_store(start, all_gather, options)
            env.update(_launcher_variables(start))

    def leave_group(self) -> None:
        """Destroy torch's default process group, if there is one; wait for a limited time.

        At most TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S seconds; then a warning is logged and the
        group is abandoned in its thread.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return
        _warn_if_unused()
        timeout_s = env.read(env.PROCESS_GROUP_SHUTDOWN_TIMEOUT_S)
        # destroy_process_group has no timeout and blocks while a peer hangs.
        if not call_in_thread(partial(_destroy_group, _current_gpu()), timeout_s=timeout_s):
            log.warning("torch.leave_group.timeout", after_s=timeout_s)


def _launcher_variables(start: StartWorker) -> dict[str, str]:
    """The variables of torchrun's workers besides ranks and address.

    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    return {
        "GROUP_RANK": str(start.node_rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(start.rank),
        "ROLE_WORLD_SIZE": str(start.world_size),
        "TORCHELASTIC_RESTART_COUNT": str(start.round - 1),
        "TORCHELASTIC_RUN_ID": f"{start.run_id}-{start.round}",
        # With it all ranks connect to the store that listens already, rank 0 too.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _require_cuda_build() -> None:
    import torch

    # torch itself raises AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'.
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise ConfigError(
            f"This worker has a GPU, but torch {torch.__version__} on its machine is built without "
            "CUDA.",
            do="Install a build of torch with CUDA on the machines, for example with the image of "
            "worker_image/Dockerfile.cuda.",
        )


def _current_gpu() -> int | None:
    """Return the number of this thread's current GPU; None if CUDA is not initialized."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _destroy_group(gpu: int | None) -> None:
    import torch
    import torch.distributed as dist

    # A thread begins with GPU 0. NCCL selects a communicator's GPU and then the thread's again
    # (src/init.cc), which would create a context on GPU 0, of another worker.
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.destroy_process_group()


def _warn_if_unused() -> None:
    """Warn that several workers did not communicate: then each has trained a model of its own."""
    import torch.distributed as dist

    if dist.get_world_size() == 1 or dist.get_rank() != 0:
        return
    # With further groups, such as those of a device mesh, the default one may remain unused.
    has_other_groups = len(dist.distributed_c10d._world.pg_map) > 1  # noqa: SLF001 - not public
    try:
        count = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]  # noqa: SLF001
    except RuntimeError:  # not every backend counts its collectives
        return
    if count == 0 and not has_other_groups:
        log.warning(
            "torch.group_unused",
            text=f"the {dist.get_world_size()} workers have used no collective of "
            "torch.distributed: probably each has trained a model of its own",
            do="wrap the model with spotfit.torch.prepare_model() or DistributedDataParallel",
        )


def torch_options(start: StartWorker) -> TorchOptions:
    """Return the options of the user's `TorchConfig`, as this worker has received them."""
    return msgspec.convert(start.framework_options, TorchOptions)


def init_default_group(backend: str, start: StartWorker, all_gather: AllGatherFn) -> None:
    """Initialize torch's default process group over all ranks of the round.

    `backend` is torch's name, such as "nccl"; `all_gather` distributes the address of rank 0, which
    opens a new port. Blocks until all ranks have joined, or raises after a timeout: torch's
    exceptions and those of `all_gather`. Sets MASTER_ADDR and MASTER_PORT of this process.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported in fact

    options = torch_options(start)
    # The prefix separates this group's keys from others that users put into the same store.
    dist.init_process_group(
        backend,
        store=PrefixStore(f"round-{start.round}", _rendezvous_store(start, all_gather, options)),
        rank=start.rank,
        world_size=start.world_size,
        timeout=datetime.timedelta(seconds=options.timeout_s),
    )


def _rendezvous_store(
    start: StartWorker, all_gather: AllGatherFn, options: TorchOptions
) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported in fact

    # Rank 0 listens before it broadcasts the port: no rank can connect too early.
    listener, address = None, ""
    if start.rank == 0:
        # Only on the address that the other nodes use: TCPStore has no authentication.
        family = socket.AF_INET6 if ":" in start.host else socket.AF_INET
        listener = socket.create_server((start.host, 0), family=family, backlog=_BACKLOG)
        address = f"{start.host} {listener.getsockname()[1]}"
    host, port = all_gather("torch_master", address.encode())[0].decode().split()
    # Not for torch: libraries on top of it read rank 0's address from the environment.
    env.update({"MASTER_ADDR": host, "MASTER_PORT": port})
    # TCPStore takes over the listening socket and closes it.
    extra: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    return TCPStore(
        host,
        int(port),
        is_master=listener is not None,
        wait_for_workers=False,  # init_process_group waits for all ranks
        timeout=datetime.timedelta(seconds=options.timeout_s),
        **extra,
    )


def import_optional(module: str, *, package: str, needed_by: str) -> Any:
    """Import and return a module that only some machines have, such as "torchft.coordination".

    Raises `MissingExtraError` if it cannot be imported: it says that the configuration `needed_by`,
    such as "TorchftConfig", needs `package`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise MissingExtraError(
            f"{needed_by} needs the package {package}, which cannot be imported on this machine: "
            f"{missing}",
            do=f"Install {package} on the machines, for example in their image, or pass another "
            "torch_config=.",
            module=package,
        ) from missing


def _default_device(start: StartWorker) -> str:
    devices = worker_devices(start, sees_peer_devices=TorchFramework.sees_peer_devices)
    return devices[0] if devices else "cpu"
