"""The run's own certificate: made from its key alone, so that every agent has the very same one."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from spotfit.core.ids import RunId
from spotfit.ship.sign import RunKey

_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "spotfit run")])
_SINCE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


class Contexts(NamedTuple):
    """How to answer a call, and how to make one."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts(secret: str, run_id: RunId) -> Contexts:
    """TLS 1.3 in which both sides must show the run's certificate. Raises `ConfigError`."""
    key = Ed25519PrivateKey.from_private_bytes(RunKey.from_text(secret, run_id).derive("wire"))
    with tempfile.TemporaryDirectory(prefix="spotfit-wire-") as folder:
        # OpenSSL takes keys from files only: this folder is ours alone, and gone in a moment.
        pem = Path(folder) / "wire.pem"
        pem.touch(mode=0o600)
        pem.write_bytes(_private_pem(key) + certificate_pem(key))
        return Contexts(
            _context(ssl.PROTOCOL_TLS_SERVER, pem), _context(ssl.PROTOCOL_TLS_CLIENT, pem)
        )


def certificate_pem(key: Ed25519PrivateKey) -> bytes:
    """Signed by itself; the same key gives the same bytes on every machine."""
    builder = x509.CertificateBuilder(
        issuer_name=_NAME,
        subject_name=_NAME,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=_SINCE,
        not_valid_after=_UNTIL,
    )
    return builder.sign(key, algorithm=None).public_bytes(serialization.Encoding.PEM)


def _private_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _context(side: int, pem: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # who shows the certificate holds the key; names prove nothing
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(pem)
    context.load_verify_locations(pem)
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody resumes a session: every connection proves itself
    return context
