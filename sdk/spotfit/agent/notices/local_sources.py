"""Preemption notices from a file, used by the live simulator and by site-specific scripts.

Preemption notices by SIGTERM, which most schedulers send before they stop a machine.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from spotfit.core.codec import decoder
from spotfit.host import env, log, system
from spotfit.model.topology import Notice


class NoticeFileContent(msgspec.Struct, frozen=True):
    """The contents of the file, as JSON."""

    reason: str = "reclaimed"
    seconds_left: float | None = None


_content_decoder = decoder(NoticeFileContent)


class FileNoticeSource:
    """Watches the path in SPOTFIT_NOTICE_FILE. Create the file atomically, by a rename."""

    def __init__(self, wake: Callable[[], None], path: Path | None = None) -> None:
        configured = env.read(env.NOTICE_FILE)
        self._path = path or (Path(configured) if configured else None)

    def poll(self, now: float) -> Notice | None:
        """Return a notice while the file exists, else None; reads the file at each call.

        `seconds_left` in the file counts from the call. A file with invalid contents is a notice
        without a deadline.
        """
        if self._path is None:
            return None
        try:
            body = self._path.read_bytes()
        except OSError:  # the file does not exist yet, or is not readable
            return None
        try:
            content = _content_decoder.decode(body)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            # The file exists, so the machine will end: this is a notice without a deadline.
            log.warning("notice.file_invalid", reason=str(error))
            content = NoticeFileContent()
        left_s = content.seconds_left
        deadline_ms = 0 if left_s is None else system.wall_ms() + int(left_s * 1000)
        return Notice(reason=content.reason, seconds_left=left_s, deadline_ms=deadline_ms)


# --- Preemption notices by SIGTERM ----------------------------------------------------------------


class SignalNoticeSource:
    """Handles SIGTERM as a notice instead of the end of the process.

    The deadline follows from SPOTFIT_SIGNAL_GRACE_S. Signals can only be handled in the main
    thread: a source that is created in another thread never returns a notice.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._received = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def poll(self, now: float) -> Notice | None:
        """Return a notice after the first SIGTERM, else None.

        Its time left is SPOTFIT_SIGNAL_GRACE_S, counted from the call, or unknown if that is 0.
        """
        if not self._received:
            return None
        # 0 is the default: the time between SIGTERM and SIGKILL depends on the scheduler.
        grace_s = env.read(env.SIGNAL_GRACE_S) or None
        deadline_ms = 0 if grace_s is None else system.wall_ms() + int(grace_s * 1000)
        return Notice(reason="SIGTERM", seconds_left=grace_s, deadline_ms=deadline_ms)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        # A handler must not log or lock: it may interrupt code that holds the same lock.
        self._received = True
        self._wake()
