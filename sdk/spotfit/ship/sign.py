"""The run's key: who holds it may read what the run keeps secret, and give orders to its machines.

An envelope is MAGIC + nonce + payload, encrypted and authenticated with AES-256-GCM. Its key is
derived for one run and one purpose, so an envelope is worth nothing anywhere else. The nonce is
made from the payload: the same payload gives the same envelope, and no nonce serves two.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.core.ids import RunId

_MAGIC = b"spotfit envelope 2\n"
_DIGEST = hashlib.sha256
_SECRET_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_HEAD_BYTES = len(_MAGIC) + _NONCE_BYTES


@dataclass(frozen=True, slots=True, repr=False)
class RunKey:
    """32 secret bytes, made by `host` when a run begins. Neither `repr` nor an error shows them."""

    _secret: bytes
    run: RunId
    """The run it is used for: told by whoever handed it over, never by a bucket."""

    def __post_init__(self) -> None:
        if len(self._secret) != _SECRET_BYTES:
            raise ConfigError(
                f"A run's key has {_SECRET_BYTES} bytes, not {len(self._secret)}.",
                do="Take the key that belongs to the run; it cannot be made up.",
            )

    def __repr__(self) -> str:
        return "RunKey(…)"

    @classmethod
    def from_text(cls, text: str, run: RunId) -> Self:
        """The key that `to_text` wrote, for that run. Raises `ConfigError`."""
        try:
            secret = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            secret = b""
        return cls(secret, run)

    def to_text(self) -> str:
        """The key in letters that fit into an environment variable. Handle it as a password."""
        return base64.urlsafe_b64encode(self._secret).decode()

    def derive(self, purpose: str) -> bytes:
        """32 secret bytes for one purpose of this run; they tell nothing of the key, of other
        purposes, or of other runs with the same key."""
        # HKDF-SHA256 (RFC 5869) of one block. Written out: the module that has it costs 40 ms.
        root = hmac.digest(b"spotfit run key", self._secret, _DIGEST)
        return hmac.digest(root, self._bound_to(purpose) + b"\x01", _DIGEST)

    def seal(self, payload: bytes, *, purpose: str) -> bytes:
        """The payload in an envelope that only holders of the key can make, or look into."""
        nonce = hmac.digest(self.derive(f"nonce {purpose}"), payload, _DIGEST)[:_NONCE_BYTES]
        return _MAGIC + nonce + self._cipher(purpose).encrypt(nonce, payload, self._told(purpose))

    def open(self, envelope: bytes, *, purpose: str) -> bytes:
        """The payload, if it is what was sealed in this run for this purpose. Raises
        `IntegrityError`."""
        if len(envelope) < _HEAD_BYTES + _TAG_BYTES or not envelope.startswith(_MAGIC):
            raise IntegrityError(
                f"This is no sealed {purpose}: it is cut short, nobody sealed it, or another "
                "version of spotfit did.",
                do="See who else may write to the bucket, then start the run again.",
                purpose=purpose,
            )
        nonce, body = envelope[len(_MAGIC) : _HEAD_BYTES], envelope[_HEAD_BYTES:]
        try:
            return self._cipher(purpose).decrypt(nonce, body, self._told(purpose))
        except InvalidTag:
            raise IntegrityError(
                f"The sealed {purpose} was changed, or sealed with the key of another run. "
                "It was not loaded.",
                do="See who else may write to the bucket, then start the run again.",
                purpose=purpose,
            ) from None

    def _cipher(self, purpose: str) -> AESGCM:
        return AESGCM(self.derive(f"seal {purpose}"))

    def _told(self, purpose: str) -> bytes:
        return _MAGIC + self._bound_to(purpose)

    def _bound_to(self, purpose: str) -> bytes:
        return f"{self.run}\0{purpose}".encode()
