"""A notice source of this machine, and how one is opened by name."""

from __future__ import annotations

from collections.abc import Callable

from spotfit.agent.notices.aws import AwsNotice
from spotfit.agent.notices.azure import AzureNotice
from spotfit.agent.notices.file import FileNotice
from spotfit.agent.notices.gcp import GcpNotice
from spotfit.agent.notices.kubernetes import KubernetesNotice
from spotfit.agent.notices.machine import MachineNotice
from spotfit.agent.notices.signal import SignalNotice
from spotfit.agent.ports import NoticeSource
from spotfit.host import plugins

GROUP = "spotfit.notices"
_OURS: dict[str, Callable[[Callable[[], None]], NoticeSource]] = {
    "aws": AwsNotice,
    "azure": AzureNotice,
    "file": FileNotice,
    "gcp": GcpNotice,
    "kubernetes": KubernetesNotice,
    "machine": MachineNotice,
    "signal": SignalNotice,
}


def open_source(name: str, wake: Callable[[], None]) -> NoticeSource:
    """The source of that name; ours need no entry point. Raises `ConfigError`.

    It may call `wake`, from anywhere, when it should be polled at once.
    """
    make = _OURS.get(name) or plugins.load(GROUP, name)
    source: NoticeSource = make(wake)
    return source
