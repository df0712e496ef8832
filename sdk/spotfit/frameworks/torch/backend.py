"""torch.distributed: a fresh store on a fresh port each round, and a group of all ranks."""

from __future__ import annotations

import datetime
import importlib
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.api import Gather
from spotfit.frameworks.devices import own_devices
from spotfit.frameworks.place import place
from spotfit.frameworks.torch.config import default_backend
from spotfit.host import env, log, machine
from spotfit.host.extras import need
from spotfit.model.wire import Start

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported in fact

_BACKLOG = 4096
_TPU_BACKEND = default_backend(gpu=False, tpu=True)
_NCCL_ENDS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")


class TorchOptions(msgspec.Struct, frozen=True):
    """What `TorchConfig` says."""

    backend: str = "gloo"
    init_method: str = "env"
    timeout_s: float = 1800


class Torch:
    """The group that `torch.distributed` calls the default one."""

    stages: tuple[tuple[str, ...], ...] = (
        ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "cloudpickle"),
        # What the first optimizer drags in, cut into pieces so that a request waits for one only.
        (
            "numpy",
            "mpmath",
            "sympy",
            "torch.fx.experimental.symbolic_shapes",
            "torch.distributed._functional_collectives",
            "torch.distributed.tensor",
            "torch.distributed.fsdp",
            "torch.distributed.checkpoint",
            "torch.distributed.checkpoint.state_dict",
            "torch._functorch._aot_autograd.descriptors",
            "torch._dynamo",
            "torch._inductor.utils",
            "torch.optim",
            "torch.utils.serialization.config",
            "spotfit.torch.checkpointer",
            "spotfit.frameworks.torch.arena",
            "spotfit.frameworks.torch.position",
            "spotfit.frameworks.torch.reading",
            "spotfit.frameworks.torch.room",
            "spotfit.frameworks.torch.undrawn",
        ),
    )
    beside_peers = True  # NCCL's way between two GPUs of a node needs both to be seen

    def environment(self, start: Start) -> dict[str, str]:
        return {
            **place(start, beside_peers=self.beside_peers),
            "MASTER_ADDR": start.host,
            "ACCELERATE_TORCH_DEVICE": _device(start),
        }

    def enter(self, start: Start, gather: Gather) -> None:
        """Meet at rank 0, whose port is new each round: nobody finds what a dead round left."""
        need("torch", extra="torch")
        import torch

        options = told(start)
        torch.set_num_threads(_threads())
        _name_interface(start.host)
        env.update(nccl_settings(options.backend, env.everything()))
        _register(options.backend)
        if (device := _device(start)).startswith("cuda"):
            torch.cuda.set_device(device)
        form(options.backend, start, gather)

    def leave(self) -> None:
        """Destroy the group; peers that hang cost `TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S`."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return
        patience_s = env.value(env.LEAVE_S)
        leaver = threading.Thread(target=dist.destroy_process_group, name="leave", daemon=True)
        leaver.start()
        leaver.join(patience_s)
        if leaver.is_alive():
            log.warning("torch.leave.given_up", after_s=patience_s)


def told(start: Start) -> TorchOptions:
    """What the caller's `TorchConfig` said."""
    return msgspec.convert(start.framework_options, TorchOptions)


def form(backend: str, start: Start, gather: Gather) -> None:
    """The default group of torch, over all ranks."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported in fact

    options = told(start)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"round-{start.round}", _meet(start, gather, options)),
        rank=start.rank,
        world_size=start.world_size,
        timeout=datetime.timedelta(seconds=options.timeout_s),
    )


def nccl_settings(backend: str, told: Mapping[str, str]) -> dict[str, str]:
    """Have a collective that failed, or took longer than `timeout_s`, end its worker.

    Nothing where no device uses NCCL, or where somebody has already decided.
    """
    uses_nccl = "nccl" in (part.rpartition(":")[2] for part in backend.split(","))
    if not uses_nccl or any(name in told for name in _NCCL_ENDS):
        return {}
    return {_NCCL_ENDS[0]: "1"}


def _meet(start: Start, gather: Gather, options: TorchOptions) -> TCPStore:
    """Rank 0 listens before it tells the port, so nobody ever dials in vain."""
    if start.rank == 0:
        listener = _listen(start.host)
        told = gather("torch_master", f"{start.host} {listener.getsockname()[1]}".encode())
    else:
        listener = None
        told = gather("torch_master", b"")
    host, port = told.decode().split()
    env.update({"MASTER_ADDR": host, "MASTER_PORT": port})
    return _store(host, int(port), listener, options)


def _store(host: str, port: int, listener: socket.socket | None, options: TorchOptions) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported in fact

    extra: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    return TCPStore(
        host,
        port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=options.timeout_s),
        **extra,
    )


def _listen(host: str) -> socket.socket:
    """On the address other nodes use, and only there: the store asks nobody for a password."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


def _name_interface(host: str) -> None:
    """Without it gloo asks the resolver for the host's own name, which may point anywhere."""
    if interface := machine.interface_of(host):
        env.set_defaults({"GLOO_SOCKET_IFNAME": interface})


def _threads() -> int:
    told = env.lookup("OMP_NUM_THREADS") or ""
    return int(told) if told.isdecimal() and int(told) > 0 else machine.cpu_count()


def _register(backend: str) -> None:
    """The backend of TPUs comes with a package of its own, and wants to be made known."""
    if backend == _TPU_BACKEND:
        bring("torch_tpu._loader", package="torch_tpu").load()


def bring(module: str, *, package: str) -> Any:
    """A module of a package that only such machines have. Raises `MissingExtraError`."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise MissingExtraError(
            f"This way of training needs the package {package}: {missing}",
            do=f"Install {package} on the machines, or choose another configuration of torch.",
            module=package,
        ) from missing


def _device(start: Start) -> str:
    mine = own_devices(start, beside_peers=Torch.beside_peers)
    return mine[0] if mine else "cpu"
