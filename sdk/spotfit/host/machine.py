"""What this machine is and has: its address, processors and accelerators."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import socket
import struct
from itertools import takewhile
from pathlib import Path

from spotfit.host import env

_SIOCGIFADDR = 0x8915
_CARD_NAMES = ("GPU-", "MIG-")
_ANYWHERE = ("192.0.2.1", 9)  # a documentation address: asked for a route, never written to


def own_address() -> str:
    """The address at which other nodes reach this one: told, or that of the default route."""
    if told := env.value(env.HOST):
        return told
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Name of the network interface that has this IPv4 address, or None. Linux only."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    for _, name in socket.if_nameindex():
        found = _address_of(name)
        if found == wanted or (found is not None and found.is_loopback and wanted.is_loopback):
            return name
    return None


def cpu_count() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def devices() -> tuple[str, ...]:
    """Accelerators of this machine, without touching one: told, or as the kernel lists them.

    A process numbers the cards it may see: of CUDA_VISIBLE_DEVICES=2,3 they are cuda:0 and cuda:1.
    """
    if told := env.value(env.DEVICES):
        return tuple(part.strip() for part in told.split(",") if part.strip())
    cards = Path("/proc/driver/nvidia/gpus")
    count = len(list(cards.iterdir())) if cards.is_dir() else 0
    visible = visible_cards(count, env.lookup("CUDA_VISIBLE_DEVICES"))
    return tuple(f"cuda:{n}" for n, _ in enumerate(visible))


def visible_cards(count: int, told: str | None) -> tuple[str, ...]:
    """Which of `count` cards CUDA shows to a process that was told so in CUDA_VISIBLE_DEVICES.

    Numbers and names (GPU-…, MIG-…) in the order given, up to the first that is no card; all
    without the variable, none where it is empty.
    """
    cards = tuple(str(n) for n in range(count))
    if told is None or not cards:
        return cards
    entries = (entry.strip() for entry in told.split(","))
    return tuple(takewhile(lambda one: one in cards or one.startswith(_CARD_NAMES), entries))


def python_version() -> str:
    """As 3.11.7."""
    return platform.python_version()


def pid() -> int:
    """This process."""
    return os.getpid()


def name() -> str:
    """What this machine calls itself."""
    return socket.gethostname()


def _address_of(interface: str) -> ipaddress.IPv4Address | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
        except OSError:
            return None
    return ipaddress.IPv4Address(answer[20:24])
