"""Content hashes of snapshot chunks: 128 bits, computed several times as fast as SHA-256.

The hash is the GMAC (RFC 4543) of the bytes under a constant, public key. Two chunks of 32 MiB
collide by chance with a probability below 2**-100. It is not collision resistant: it identifies
equal bytes, and does not authenticate who wrote them.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# Part of the snapshot format: other values would make stored chunks unreadable.
_KEY = b"spotfit's marks."
_NONCE = bytes(12)


def compute_content_hash(body: bytes | bytearray | memoryview) -> str:
    """Return the hash of at most 2 GiB, in hex."""
    # The body is authenticated data and nothing is encrypted: the result is the tag alone.
    return AESGCM(_KEY).encrypt(_NONCE, b"", body).hex()
