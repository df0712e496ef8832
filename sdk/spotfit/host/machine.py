"""Properties of this machine: network address, processors, accelerators, Python version."""

from __future__ import annotations

import getpass
import ipaddress
import math
import os
import platform
import re
import socket
import struct
import sys
from itertools import takewhile
from pathlib import Path

from spotfit.host import env

if sys.platform != "win32":
    import fcntl

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: get the address of an interface
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GPU_UUID_PREFIXES = ("GPU-", "MIG-")
_GPU_NODE = re.compile(r"nvidia\d+")  # not nvidiactl, nvidia-uvm and nvidia-modeset
# TEST-NET-1 (RFC 5737): connecting a UDP socket selects a route and sends no packet.
_ROUTE_PROBE_ADDRESS = ("192.0.2.1", 9)


def own_address() -> str:
    """Return the address at which other nodes reach this machine, such as '10.0.0.7'.

    SPOTFIT_HOST if set, else the local IPv4 address of the default route, else 127.0.0.1 (no
    network). Sends no packet.
    """
    if configured := env.read(env.HOST):
        return configured
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ROUTE_PROBE_ADDRESS)
        except OSError:  # the machine has no network
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def login_name() -> str:
    """Return the name of the user of this process; '' if the system does not know it."""
    try:
        return getpass.getuser()
    # A container may run as a user id without entry: KeyError until Python 3.12, then OSError.
    # ImportError: the system has no user database (Windows without USERNAME).
    except (KeyError, OSError, ImportError):
        return ""


def interface_with_address(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address, such as 'eth0'. Linux only.

    All loopback addresses (127.0.0.0/8) belong to the loopback interface. None if no interface has
    the address, `address` is a host name, or the system is another one.
    """
    if sys.platform == "win32":
        return None
    try:
        target = ipaddress.ip_address(address)
    except ValueError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # struct ifreq: the name in 16 bytes, then a sockaddr_in whose address starts at byte 4.
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            found = ipaddress.IPv4Address(reply[20:24])
            if found == target or (found.is_loopback and target.is_loopback):
                return name
    return None


def instance_id() -> str:
    """Return an id of the instance of this machine: equal for the containers of one instance.

    SPOTFIT_INSTANCE if set, in a pod the name of its node, else the kernel's boot id; '' if that is
    unknown.
    """
    return env.read(env.INSTANCE) or env.read(env.KUBERNETES_NODE) or boot_id()


def boot_id() -> str:
    """Return the id of the running kernel, equal in all containers of an instance; '' if unknown.

    It is generated at the first read and not namespaced (`sysctl_bootid` in drivers/char/random.c
    of Linux). The kubelet reports it as `status.nodeInfo.bootID`.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux, or a sandbox that hides it
        return ""


def cpu_count(root: Path = Path("/")) -> int:
    """Return the number of processors that this process may use, at least 1.

    Where the system allows it, the processors that a container or batch system withholds are left
    out. `root` is for tests.
    """
    # Containers and batch systems restrict a process to some of the machine's processors.
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cpu_quota(root / "sys/fs/cgroup")
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _cpu_quota(cgroup: Path) -> float | None:
    """Return how many processors the control group may use on average; None without a quota."""
    # Of version 2: "200000 100000", or "max 100000". Of version 1: one number per file, or -1.
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            amounts = " ".join((cgroup / name).read_text() for name in names).split()
        except OSError:
            continue
        if len(amounts) == 2 and all(map(str.isdecimal, amounts)) and int(amounts[1]):
            return int(amounts[0]) / int(amounts[1])
    return None


def devices() -> tuple[str, ...]:
    """Return the accelerators of this machine, such as ('cuda:0', 'cuda:1'); () without any.

    SPOTFIT_DEVICES if set, else the NVIDIA GPUs in /dev or /proc. No driver is loaded and no CUDA
    context is created. GPUs are numbered among the visible ones: with CUDA_VISIBLE_DEVICES=2,3 the
    result is ('cuda:0', 'cuda:1').
    """
    if configured := env.read(env.DEVICES):
        return tuple(part.strip() for part in configured.split(",") if part.strip())
    visible = visible_gpus(gpu_count(), env.lookup("CUDA_VISIBLE_DEVICES"))
    return tuple(f"cuda:{n}" for n, _ in enumerate(visible))


def gpu_count(dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> int:
    """Return the number of NVIDIA GPUs of this machine or container; 0 without a driver.

    `dev` and `proc` are the directories of devices and of the kernel. Opens no device.
    """
    # Counting files needs no CUDA context, which would occupy GPU memory and break fork().
    nodes = sum(_GPU_NODE.fullmatch(path.name) is not None for path in dev.glob("nvidia*"))
    if nodes:
        return nodes
    # In a container the device nodes decide: device plugins that only add nodes, such as that of
    # GKE (https://github.com/NVIDIA/nvidia-container-toolkit/issues/209), leave the host's
    # /proc/driver/nvidia visible, with the GPUs of all containers; gVisor has no such directory.
    # On a host the nodes are created when the first program uses a GPU.
    cards = proc / "driver" / "nvidia" / "gpus"
    return len(list(cards.iterdir())) if cards.is_dir() else 0


def visible_gpus(count: int, visible_devices: str | None) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES that CUDA honours on a machine with `count` GPUs.

    `visible_devices` is the value of the variable. Entries are indices or UUIDs (GPU-…, MIG-…). As
    in CUDA, the list ends at the first invalid entry. Returns all indices, such as ('0', '1'), if
    the variable is unset (None), and () if it is empty or `count` is 0.
    """
    indices = tuple(str(n) for n in range(count))
    if visible_devices is None or not indices:
        return indices
    entries = (entry.strip() for entry in visible_devices.split(","))
    return tuple(
        takewhile(lambda gpu: gpu in indices or gpu.startswith(_GPU_UUID_PREFIXES), entries)
    )


def python_version() -> str:
    """Return the Python version of this process, for example '3.11.7'."""
    return platform.python_version()


def pid() -> int:
    """Return the process id of this process. A forked child gets its own."""
    return os.getpid()


def hostname() -> str:
    """Return the host name of this machine, as the operating system has it."""
    return socket.gethostname()
