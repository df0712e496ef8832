"""SignedCollectives: small Python values between the processes of JAX's runtime.

JAX's collectives have no authentication. Values are pickled, so each is signed with a key that rank
0 has distributed through the agents, and verified before it is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import struct
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from spotfit.core.errors import ConfigError, IntegrityError

KEY_BYTES = 32
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = hashlib.sha256().digest_size
# Most values fit. Every size is compiled once, so that larger ones are rounded up.
_SMALL_BYTES = 4096


class SignedCollectives:
    """Collectives of all ranks. With one rank they return at once."""

    def __init__(self, key: bytes, world_size: int) -> None:
        """`key` is the same on all ranks, and known to them only."""
        self._key = key
        self._world_size = world_size

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Blocks until all ranks call it."""
        if self._world_size == 1:
            return [value]
        frame = self._sign(value)
        rows = multihost_utils.process_allgather(_padded(frame, _SMALL_BYTES))
        largest = max(map(_frame_bytes, rows))
        if largest > _SMALL_BYTES:
            rows = multihost_utils.process_allgather(_padded(frame, _rounded(largest)))
        return [self._verify(row) for row in rows]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Blocks until all ranks call it."""
        if self._world_size == 1:
            return value
        frame = self._sign(value if jax.process_index() == 0 else None)
        row = multihost_utils.broadcast_one_to_all(_padded(frame, _SMALL_BYTES))
        if (size := _frame_bytes(row)) > _SMALL_BYTES:
            row = multihost_utils.broadcast_one_to_all(_padded(frame, _rounded(size)))
        return self._verify(row)

    def _sign(self, value: Any) -> bytes:
        body = pickle.dumps(value)
        return _LENGTH.pack(len(body)) + self._digest(body) + body

    def _verify(self, row: Any) -> Any:
        frame = np.asarray(row).tobytes()
        (length,) = _LENGTH.unpack_from(frame)
        digest, body = frame[_LENGTH.size :][:_DIGEST_BYTES], frame[_LENGTH.size + _DIGEST_BYTES :]
        body = body[:length]
        if not hmac.compare_digest(digest, self._digest(body)):
            raise IntegrityError(
                "A value that another rank has sent is corrupt, or from another training.",
                do="Check the network between the machines: only they may reach each other.",
            )
        return pickle.loads(body)  # noqa: S301 - the signature was verified

    def _digest(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")


def check_runtime(rank: int, world_size: int) -> None:
    """Raise `ConfigError` unless JAX's runtime consists of all workers, with their world ranks."""
    if (jax.process_index(), jax.process_count()) != (rank, world_size):
        raise ConfigError(
            f"Checkpointer needs a JAX runtime of all {world_size} workers, but this one is "
            f"process {jax.process_index()} of {jax.process_count()}.",
            do="Use JaxTrainer, which initializes jax.distributed before it calls your function.",
        )


def _frame_bytes(row: Any) -> int:
    (length,) = _LENGTH.unpack_from(np.asarray(row[: _LENGTH.size]).tobytes())
    return int(_LENGTH.size) + _DIGEST_BYTES + int(length)


def _padded(frame: bytes, size_bytes: int) -> np.ndarray[Any, Any]:
    """Return the frame's first bytes, or all of it and zeros."""
    return np.frombuffer(frame[:size_bytes].ljust(size_bytes, b"\0"), np.uint8)


def _rounded(size_bytes: int) -> int:
    return int(1 << (size_bytes - 1).bit_length())
