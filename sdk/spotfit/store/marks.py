"""Marks: 128 bits by which bytes are known again, taken several times as fast as a SHA-256.

A mark is the GMAC of the bytes under a key that everybody knows. Bytes that differ by chance, by
damage or by training share one less often than once in 2**100 pairs. Whoever wants two that do can
make them: a mark says that bytes are the same as before, and nothing of who wrote them.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_KEY = b"spotfit's marks."
_NONCE = bytes(12)


def mark_of(body: bytes | bytearray | memoryview) -> str:
    """The mark of these bytes, in hex. There may be 2 GiB of them."""
    return AESGCM(_KEY).encrypt(_NONCE, b"", body).hex()
