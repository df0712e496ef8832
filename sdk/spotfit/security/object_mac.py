"""Message authentication codes (MACs) of the run's unencrypted objects.

An authenticated object is its content and one more line, `hmac-sha256 <64 hex digits>`. The MAC
covers the run, the object key and the content, so that an object is rejected under another key and
in another run. Readers without the run key remove the line with `strip_mac`.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from spotfit.security.run_key import RunKey

_MAC_LINE = re.compile(rb"\nhmac-sha256 ([0-9a-f]{64})\Z")


def strip_mac(body: bytes) -> bytes:
    """Return the content of an object without its MAC; `body` itself if it has none.

    Does not verify the MAC. Content that is JSON never ends with such a line.
    """
    match = _MAC_LINE.search(body)
    return body[: match.start()] if match else body


class ObjectMac:
    """Adds and verifies the MACs of one run's objects, with a key derived from the run key."""

    def __init__(self, key: RunKey) -> None:
        self._key = key.derive("object mac")

    def add(self, object_key: str, content: bytes) -> bytes:
        """Return the body to store under `object_key`, relative to the run's root.

        Equal arguments give equal bodies.
        """
        return content + b"\nhmac-sha256 " + self._compute(object_key, content)

    def is_valid(self, object_key: str, body: bytes) -> bool:
        """Whether a holder of the run key made `body` with `add` for this object key."""
        match = _MAC_LINE.search(body)
        return match is not None and hmac.compare_digest(
            match[1], self._compute(object_key, body[: match.start()])
        )

    def _compute(self, object_key: str, content: bytes) -> bytes:
        # No object key contains a NUL, so the two parts cannot be divided in another way.
        message = object_key.encode() + b"\0" + content
        return hmac.digest(self._key, message, hashlib.sha256).hex().encode()
