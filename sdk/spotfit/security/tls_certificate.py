"""TLS with the run's certificate, which every process derives from the run key.

There is no certificate authority: a peer that presents this certificate holds the run key.
"""

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
from spotfit.security.run_key import RunKey

_SUBJECT = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "spotfit run")])
# Always valid: expiry would end long runs, and clocks of machines may be wrong. The key ends with
# the run instead.
_NOT_VALID_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_VALID_AFTER = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


class TlsContexts(NamedTuple):
    """TLS contexts for accepting and for opening connections."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def make_tls_contexts(secret: str, run_id: RunId) -> TlsContexts:
    """Return contexts of TLS 1.3 in which both sides must present the run's certificate.

    Raises `ConfigError` if `secret` is not a run key.
    """
    key = Ed25519PrivateKey.from_private_bytes(RunKey.from_text(secret, run_id).derive("wire"))
    with tempfile.TemporaryDirectory(prefix="spotfit-wire-") as folder:
        # OpenSSL loads keys from files only; mkdtemp() makes the directory private.
        pem = Path(folder) / "wire.pem"
        pem.touch(mode=0o600)
        private_key = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        pem.write_bytes(private_key + self_signed_certificate_pem(key))
        return TlsContexts(
            _make_context(ssl.PROTOCOL_TLS_SERVER, pem), _make_context(ssl.PROTOCOL_TLS_CLIENT, pem)
        )


def self_signed_certificate_pem(key: Ed25519PrivateKey) -> bytes:
    """Return the certificate of that key. Equal keys give equal bytes on every machine."""
    # Constant fields, and Ed25519 because its signatures are deterministic.
    builder = x509.CertificateBuilder(
        issuer_name=_SUBJECT,
        subject_name=_SUBJECT,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=_NOT_VALID_BEFORE,
        not_valid_after=_NOT_VALID_AFTER,
    )
    return builder.sign(key, algorithm=None).public_bytes(serialization.Encoding.PEM)


def _make_context(side: int, pem: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself proves the key; machines have no names
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(pem)
    context.load_verify_locations(pem)
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no session resumption: every connection must present it
    return context
