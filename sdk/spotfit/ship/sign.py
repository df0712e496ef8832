"""The run's key: who holds it may give orders to the run's machines, and nobody else.

An envelope is MAGIC + HMAC-SHA256 + payload. The HMAC is made with a key derived for one purpose,
so an envelope for one purpose is worth nothing for another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from typing import Self

from spotfit.core.errors import ConfigError, IntegrityError

_MAGIC = b"spotfit envelope 1\n"
_DIGEST = hashlib.sha256
_SECRET_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _DIGEST().digest_size


@dataclass(frozen=True, slots=True, repr=False)
class RunKey:
    """32 secret bytes, made by `host` when a run begins. Neither `repr` nor an error shows them."""

    _secret: bytes

    def __post_init__(self) -> None:
        if len(self._secret) != _SECRET_BYTES:
            raise ConfigError(
                f"A run's key has {_SECRET_BYTES} bytes, not {len(self._secret)}.",
                do="Take the key that belongs to the run; it cannot be made up.",
            )

    def __repr__(self) -> str:
        return "RunKey(…)"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The key that `to_text` wrote. Raises `ConfigError`."""
        try:
            secret = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            secret = b""
        return cls(secret)

    def to_text(self) -> str:
        """The key in letters that fit into an environment variable. Handle it as a password."""
        return base64.urlsafe_b64encode(self._secret).decode()

    def derive(self, purpose: str) -> bytes:
        """32 secret bytes for one purpose; they tell nothing of the key or of other purposes."""
        # HKDF-SHA256 (RFC 5869) of one block. Written out: the library that has it costs 40 ms.
        root = hmac.digest(b"spotfit run key", self._secret, _DIGEST)
        return hmac.digest(root, purpose.encode() + b"\x01", _DIGEST)

    def sign(self, payload: bytes, *, purpose: str) -> bytes:
        """The payload in an envelope that only a holder of the key can make."""
        return _MAGIC + self._seal(payload, purpose) + payload

    def verify(self, envelope: bytes, *, purpose: str) -> bytes:
        """The payload, if it is what was signed for this purpose. Raises `IntegrityError`."""
        if len(envelope) < _HEAD_BYTES or not envelope.startswith(_MAGIC):
            raise IntegrityError(
                f"This is no signed {purpose}: it is cut short, or nobody signed it.",
                do="See who else may write to the bucket, then start the run again.",
                purpose=purpose,
            )
        seal, payload = envelope[len(_MAGIC) : _HEAD_BYTES], envelope[_HEAD_BYTES:]
        if not hmac.compare_digest(seal, self._seal(payload, purpose)):
            raise IntegrityError(
                f"The signed {purpose} was changed, or signed with the key of another run. "
                "It was not loaded.",
                do="See who else may write to the bucket, then start the run again.",
                purpose=purpose,
            )
        return payload

    def _seal(self, payload: bytes, purpose: str) -> bytes:
        return hmac.digest(self.derive(f"sign {purpose}"), payload, _DIGEST)
