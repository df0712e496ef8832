"""The run key, and encryption with keys that are derived from it.

The holder of the run key can read the run's sealed payloads and command its machines. An envelope
is MAGIC + nonce + ciphertext of AES-256-GCM. Its key is derived for one run and one purpose, so an
envelope cannot be used in another run or for another purpose. The nonce is an HMAC of the payload:
equal payloads give equal envelopes, which makes sealing idempotent, and different payloads do not
share a nonce (0025).
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
_NONCE_BYTES = 12  # of AES-GCM (NIST SP 800-38D)
_TAG_BYTES = 16
_HEADER_BYTES = len(_MAGIC) + _NONCE_BYTES


@dataclass(frozen=True, slots=True, repr=False)
class RunKey:
    """32 secret bytes, created with the run. `repr` and errors never show them."""

    _secret: bytes
    run_id: RunId
    """The run it is used for, from the launch of this process, never from the bucket."""

    def __post_init__(self) -> None:
        if len(self._secret) != _SECRET_BYTES:
            raise ConfigError(
                f"The run key has {len(self._secret)} bytes; it must have {_SECRET_BYTES}.",
                do="Use the key that fit() created for the run, and check SPOTFIT_RUN_SECRET.",
            )

    def __repr__(self) -> str:
        return "RunKey(…)"

    @classmethod
    def from_text(cls, text: str, run_id: RunId) -> Self:
        """Parse the text of `to_text`. Raises `ConfigError` if it is not a key."""
        try:
            secret = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            secret = b""  # the length check rejects it, without the text in the traceback
        return cls(secret, run_id)

    def to_text(self) -> str:
        """Return the key as URL-safe base64, for an environment variable. It is a secret."""
        return base64.urlsafe_b64encode(self._secret).decode()

    def derive(self, purpose: str) -> bytes:
        """Return 32 secret bytes for one purpose of this run.

        They reveal neither the run key nor the bytes of other purposes or other runs.
        """
        # HKDF-SHA256 (RFC 5869) of one block, written out because importing cryptography's module
        # takes 40 ms.
        root = hmac.digest(b"spotfit run key", self._secret, _DIGEST)
        return hmac.digest(root, self._derivation_context(purpose) + b"\x01", _DIGEST)

    def seal(self, payload: bytes, *, purpose: str) -> bytes:
        """Return the payload in an envelope. Idempotent: equal payloads give equal envelopes."""
        # The nonce is derived with a key of its own: it must not be related to the cipher's key.
        nonce = hmac.digest(self.derive(f"nonce {purpose}"), payload, _DIGEST)[:_NONCE_BYTES]
        return (
            _MAGIC
            + nonce
            + self._cipher(purpose).encrypt(nonce, payload, self._associated_data(purpose))
        )

    def open(self, envelope: bytes, *, purpose: str) -> bytes:
        """Return the payload of an envelope that was sealed in this run for this purpose.

        Raises `IntegrityError` for anything else.
        """
        if len(envelope) < _HEADER_BYTES + _TAG_BYTES or not envelope.startswith(_MAGIC):
            raise IntegrityError(
                f"This is not a sealed {purpose}: it is truncated, was not sealed, or was sealed "
                "by another version of spotfit.",
                do="Check who else can write to the bucket, then start the run again.",
                purpose=purpose,
            )
        nonce, body = envelope[len(_MAGIC) : _HEADER_BYTES], envelope[_HEADER_BYTES:]
        try:
            return self._cipher(purpose).decrypt(nonce, body, self._associated_data(purpose))
        except InvalidTag:
            raise IntegrityError(
                f"The sealed {purpose} was modified, or sealed with the key of another run. "
                "It was not loaded.",
                do="Check who else can write to the bucket, then start the run again.",
                purpose=purpose,
            ) from None

    def _cipher(self, purpose: str) -> AESGCM:
        return AESGCM(self.derive(f"seal {purpose}"))

    def _associated_data(self, purpose: str) -> bytes:
        return _MAGIC + self._derivation_context(purpose)

    def _derivation_context(self, purpose: str) -> bytes:
        return f"{self.run_id}\0{purpose}".encode()
