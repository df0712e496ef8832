"""Lookup of notice sources by name: built-in ones and plug-ins (entry point spotfit.notices)."""

from __future__ import annotations

from collections.abc import Callable

from spotfit.agent.notices.cloud import SOURCES, DetectedCloudNoticeSource, OpenNoticeSource
from spotfit.agent.notices.file import FileNoticeSource
from spotfit.agent.notices.kubernetes import KubernetesNoticeSource
from spotfit.agent.notices.signal import SignalNoticeSource
from spotfit.agent.ports import NoticeSource
from spotfit.host import plugins

ENTRY_POINT_GROUP = "spotfit.notices"
_BUILTIN_SOURCES: dict[str, OpenNoticeSource] = {
    **SOURCES,
    "file": FileNoticeSource,
    "kubernetes": KubernetesNoticeSource,
    "machine": DetectedCloudNoticeSource,
    "signal": SignalNoticeSource,
}


def open_notice_source(name: str, wake: Callable[[], None]) -> NoticeSource:
    """Open the source of that name. Raises `ConfigError` if there is none.

    The source may call `wake` from any thread to be polled at once.
    """
    create = _BUILTIN_SOURCES.get(name) or plugins.load(ENTRY_POINT_GROUP, name)
    source: NoticeSource = create(wake)
    return source
