"""Message authentication codes (MACs) of the run's unencrypted objects.

An authenticated object is its content and one more line, `hmac-sha256 <64 hex digits>`. The MAC
covers the run, the object key and the content, so that an object is rejected under another key and
in another run. Readers without the run key remove the line with `strip_mac`.
"""

from __future__ import annotations

import hashlib
import hmac

from spotfit.security.run_key import RunKey

_MAC_LINE_START = b"\nhmac-sha256 "
_MAC_BYTES = 64  # hexadecimal digits
_MAC_LINE_BYTES = len(_MAC_LINE_START) + _MAC_BYTES
_BLOCK_BYTES = 64  # of SHA-256; the derived key is not longer


def strip_mac(body: bytes) -> bytes:
    """Return the content of an object without its MAC; `body` itself if it has none.

    Does not verify the MAC. Content that is JSON never ends with such a line.
    """
    return body[:-_MAC_LINE_BYTES] if _ends_with_mac(body) else body


def _ends_with_mac(body: bytes) -> bool:
    # At its only possible place: the search of a whole body costs more than its MAC.
    return body[-_MAC_LINE_BYTES:-_MAC_BYTES] == _MAC_LINE_START


class ObjectMac:
    """Adds and verifies the MACs of one run's objects, with a key derived from the run key."""

    def __init__(self, key: RunKey) -> None:
        padded = key.derive("object mac").ljust(_BLOCK_BYTES, b"\0")
        # HMAC (RFC 2104) hashes a block of the key before the message and before that hash. Both
        # are hashed once: `hmac.digest` does it for each message, which costs more than the rest.
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def add(self, object_key: str, content: bytes) -> bytes:
        """Return the body to store under `object_key`, relative to the run's root.

        Equal arguments give equal bodies.
        """
        return content + _MAC_LINE_START + self._compute(object_key, content)

    def is_valid(self, object_key: str, body: bytes) -> bool:
        """Whether a holder of the run key made `body` with `add` for this object key."""
        return _ends_with_mac(body) and hmac.compare_digest(
            body[-_MAC_BYTES:], self._compute(object_key, body[:-_MAC_LINE_BYTES])
        )

    def _compute(self, object_key: str, content: bytes) -> bytes:
        # No object key contains a NUL, so the two parts cannot be divided in another way.
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(object_key.encode() + b"\0" + content)
        outer.update(inner.digest())
        return outer.hexdigest().encode()
