"""torch.distributed: a fresh store on a fresh port each round, and a group of all ranks."""

from __future__ import annotations

import datetime
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.frameworks.api import Gather
from spotfit.frameworks.devices import own_devices
from spotfit.host import env, log, machine
from spotfit.host.extras import need
from spotfit.model.wire import Start

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported in fact

_BACKLOG = 4096


class TorchOptions(msgspec.Struct, frozen=True):
    """What `TorchConfig` says."""

    backend: str | None = None
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
            "torch._functorch._aot_autograd.descriptors",
            "torch._dynamo",
            "torch._inductor.utils",
            "torch.optim",
            "torch.utils.serialization.config",
        ),
    )

    def environment(self, start: Start) -> dict[str, str]:
        return {
            "RANK": str(start.rank),
            "LOCAL_RANK": str(start.local_rank),
            "WORLD_SIZE": str(start.world_size),
            "LOCAL_WORLD_SIZE": str(start.local_world_size),
            "NODE_RANK": str(start.node_rank),
            "MASTER_ADDR": start.host,
            "ACCELERATE_TORCH_DEVICE": _device(start),
        }

    def enter(self, start: Start, gather: Gather) -> None:
        """Meet at rank 0, whose port is new each round: nobody finds what a dead round left."""
        need("torch", extra="torch")
        import torch
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported in fact

        options = _options(start)
        torch.set_num_threads(_threads())
        _name_interface(start.host)
        if _device(start) != "cpu":
            torch.cuda.set_device(_device(start))
        dist.init_process_group(
            options.backend or ("gloo" if _device(start) == "cpu" else "nccl"),
            store=PrefixStore(f"round-{start.round}", _meet(start, gather, options)),
            rank=start.rank,
            world_size=start.world_size,
            timeout=datetime.timedelta(seconds=options.timeout_s),
        )

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


def _options(start: Start) -> TorchOptions:
    options = msgspec.convert(start.framework_options, TorchOptions)
    if options.init_method not in ("env", "tcp"):
        raise ConfigError(
            f"init_method must be 'env' or 'tcp', not {options.init_method!r}.",
            do="Leave it out: both meet at rank 0's address and port.",
        )
    return options


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


def _device(start: Start) -> str:
    mine = own_devices(start)
    return mine[0] if mine else "cpu"
