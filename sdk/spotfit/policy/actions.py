"""What judgement can order. Each carries its reason."""

from __future__ import annotations

import msgspec

from spotfit.core.ids import Token
from spotfit.model.events import Event
from spotfit.model.group import Role


class Write(msgspec.Struct, frozen=True):
    """Put this into the journal, then judge afresh."""

    event: Event


class Order(msgspec.Struct, frozen=True):
    """Plan machines for so many workers, or one for validations, and write down the intent."""

    workers: int
    why: str
    role: Role = "train"


class Submit(msgspec.Struct, frozen=True):
    """Carry out an intent that is written down, and write down its outcome."""

    token: Token


class Release(msgspec.Struct, frozen=True):
    """Let a group go (and others with it), and write that down."""

    token: Token
    others: tuple[Token, ...] = ()


class Wait(msgspec.Struct, frozen=True):
    """Nothing to do before `until`, unless something happens."""

    until: float
    why: str


class Rest(msgspec.Struct, frozen=True):
    """The fit has ended and nothing of it is left to let go."""

    why: str = "all is done"


Action = Write | Order | Submit | Release | Wait | Rest
