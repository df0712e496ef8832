"""The user's callbacks, in a process of their own: told in order, and never waited for here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from spotfit.core.codec import decoder, encode
from spotfit.model.audience import Failed, Heard, Hello, RankTold, Reported
from spotfit.model.watch import Trouble

_heard = decoder(Heard)


class Ear(Protocol):
    """The process, as far as this room needs it."""

    def send(self, body: bytes) -> None: ...

    def kill(self) -> None: ...


Begin = Callable[[Callable[[list[bytes]], None], Callable[[str, bool], None]], Ear]
"""Starts the process, given who hears its frames and who hears of its end."""


class LiveAudience:
    """`Audience` in a process that is started when there is something to tell."""

    def __init__(self, hello: Hello, begin: Begin) -> None:
        self._hello = hello
        self._begin = begin
        self._ear: Ear | None = None
        self._said = 0
        self._heard = 0
        self._trouble: Trouble | None = None

    def reported(self, metrics: Sequence[msgspec.Raw], checkpoint: str | None) -> None:
        self._tell(encode(Reported(tuple(metrics), checkpoint)))

    def failed(self, pickles: dict[int, str], told: dict[int, str]) -> None:
        ranks = tuple(RankTold(rank, told[rank], pickles.get(rank)) for rank in sorted(told))
        self._tell(encode(Failed(ranks)))

    def trouble(self) -> Trouble | None:
        return self._trouble

    @property
    def caught_up(self) -> bool:
        return self._trouble is not None or self._heard == self._said

    def close(self) -> None:
        """End the process."""
        if self._ear is not None:
            self._ear.kill()

    def _tell(self, frame: bytes) -> None:
        if self._ear is None:
            self._ear = self._begin(self._hear, self._ended)
            self._ear.send(encode(self._hello))
        self._said += 1
        self._ear.send(frame)

    def _hear(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._heard += 1
            self._note(_heard.decode(frame))

    def _note(self, heard: Heard) -> None:
        if heard.trouble is not None and self._trouble is None:
            self._trouble = Trouble("a callback raised", heard.trouble, heard.pickle_key)

    def _ended(self, how: str, _clean: bool) -> None:  # noqa: FBT001 - as a child's end is told
        if self._trouble is None:
            why = "the process of the callbacks died"
            self._trouble = Trouble(why, f"The process of the callbacks {how}.")
