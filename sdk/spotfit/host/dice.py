"""The only source of randomness: names that are never used twice, secrets, and jitter."""

from __future__ import annotations

import random
import secrets

from spotfit.core.ids import AgentId, RunId, Token


def new_run_id() -> RunId:
    """A run that never was."""
    return RunId(secrets.token_hex(16))


def new_agent_id() -> AgentId:
    """One life of one agent."""
    return AgentId(f"a-{secrets.token_hex(6)}")


def new_token() -> Token:
    """One request for machines; fit for the names of every cloud."""
    return Token(f"t-{secrets.token_hex(6)}")


def new_secret_bytes(count: int = 32) -> bytes:
    """Bytes that nobody can guess."""
    return secrets.token_bytes(count)


def reseed() -> None:
    """Give a forked process dice of its own."""
    random.seed()
