"""A file appears: how the live simulator tells a machine that it will be taken away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from spotfit.core.codec import decoder
from spotfit.host import clocks, env, log
from spotfit.model.world import Notice


class Announcement(msgspec.Struct, frozen=True):
    """What the file holds, as JSON."""

    reason: str = "reclaimed"
    seconds_left: float | None = None


_announcement = decoder(Announcement)


class FileNotice:
    """Watches the path in SPOTFIT_NOTICE_FILE, which is to appear whole (by a rename)."""

    def __init__(self, wake: Callable[[], None], path: Path | None = None) -> None:
        told = env.value(env.NOTICE_FILE)
        self._path = path or (Path(told) if told else None)

    def poll(self, now: float) -> Notice | None:
        if self._path is None:
            return None
        try:
            body = self._path.read_bytes()
        except OSError:  # not there (yet), or not to be read: no notice
            return None
        return _notice(body)


def _notice(body: bytes) -> Notice:
    """Even a file that nobody can read says that something is coming."""
    try:
        told = _announcement.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError) as garbage:
        log.warning("notice.file", why=str(garbage))
        told = Announcement()
    left = told.seconds_left
    deadline_ms = 0 if left is None else clocks.wall_ms() + int(left * 1000)
    return Notice(told.reason, left, deadline_ms)
