"""The run key, and encryption with keys that are derived from it.

The holder of the run key can read the run's sealed payloads and command its machines. An envelope
is MAGIC + nonce + ciphertext of AES-256-GCM. Its key is derived for one run and one purpose, so an
envelope cannot be used in another run or for another purpose. The nonce is an HMAC of the payload:
equal payloads give equal envelopes, which makes sealing idempotent, and different payloads do not
share a nonce (0025).

TLS with the run's certificate, which every process derives from the run key.

There is no certificate authority: a peer that presents this certificate holds the run key.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import hmac
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.x509.oid import NameOID

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.core.ids import RunId

_MAGIC_OF_ALL_VERSIONS = b"spotfit envelope "
_MAGIC = _MAGIC_OF_ALL_VERSIONS + b"2\n"
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
                f"The key of the run has {len(self._secret)} bytes; it must have {_SECRET_BYTES}.",
                do="Use the key that fit() created for the run, and check SPOTFIT_RUN_SECRET.",
            )

    def __repr__(self) -> str:
        return "RunKey(…)"

    @classmethod
    def from_text(cls, text: str, run_id: RunId) -> Self:
        """Parse the text of `to_text` into the key of the run `run_id`.

        The text comes from SPOTFIT_RUN_SECRET or the user's key file. Raises `ConfigError` if it is
        not a key; whether it is the key of that run is not checked here.
        """
        try:
            secret = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            secret = b""  # the length check rejects it, without the text in the traceback
        return cls(secret, run_id)

    def to_text(self) -> str:
        """Return the key as URL-safe base64, for SPOTFIT_RUN_SECRET. It is a secret."""
        return base64.urlsafe_b64encode(self._secret).decode()

    def derive(self, purpose: str) -> bytes:
        """Return 32 secret bytes for one purpose of this run, always the same ones.

        `purpose` is any text, such as `"wire"` for TLS. The bytes reveal neither the run key nor
        the bytes of other purposes or other runs.
        """
        # HKDF-SHA256 (RFC 5869) of one block, written out because importing cryptography's module
        # takes 40 ms.
        root = hmac.digest(b"spotfit run key", self._secret, _DIGEST)
        return hmac.digest(root, self._derivation_context(purpose) + b"\x01", _DIGEST)

    def seal(self, payload: bytes, *, purpose: str) -> bytes:
        """Return `payload` in an envelope, encrypted and authenticated for this run and purpose.

        `purpose` is an object key, or a text such as `"code bundle"`; `open` requires an equal one.
        Idempotent: equal payloads and purposes give equal envelopes.
        """
        # The nonce is derived with a key of its own: it must not be related to the cipher's key.
        nonce = hmac.digest(self.derive(f"nonce {purpose}"), payload, _DIGEST)[:_NONCE_BYTES]
        return (
            _MAGIC
            + nonce
            + self._cipher(purpose).encrypt(nonce, payload, self._associated_data(purpose))
        )

    def open(self, envelope: bytes, *, purpose: str) -> bytes:
        """Return the payload of an envelope that `seal` made in this run for this purpose.

        Raises `IntegrityError` for anything else: other bytes, or an envelope that was modified, or
        sealed in another run, for another purpose or by an incompatible version.
        """
        if len(envelope) < _HEADER_BYTES + _TAG_BYTES or not envelope.startswith(_MAGIC):
            if _MAGIC.startswith(envelope[: len(_MAGIC)]):
                problem = "it is truncated"
            elif envelope.startswith(_MAGIC_OF_ALL_VERSIONS):
                problem = "it was sealed by another version of spotfit"
            else:
                problem = "it was not sealed by spotfit"
            raise IntegrityError(
                f"The sealed {purpose} cannot be opened: {problem}.",
                do="Use one version of spotfit on all machines of the run. Check who else can "
                "write to the storage of the run, then start the run again.",
                purpose=purpose,
            )
        nonce, body = envelope[len(_MAGIC) : _HEADER_BYTES], envelope[_HEADER_BYTES:]
        try:
            return self._cipher(purpose).decrypt(nonce, body, self._associated_data(purpose))
        except InvalidTag:
            raise IntegrityError(
                f"The sealed {purpose} was not loaded: it was modified, or sealed with the key of "
                "another run.",
                do="Check who else can write to the storage of the run, then start the run again.",
                purpose=purpose,
            ) from None

    def _cipher(self, purpose: str) -> AESGCM:
        return AESGCM(self.derive(f"seal {purpose}"))

    def _associated_data(self, purpose: str) -> bytes:
        return _MAGIC + self._derivation_context(purpose)

    def _derivation_context(self, purpose: str) -> bytes:
        return f"{self.run_id}\0{purpose}".encode()


# --- TLS with the run's certificate ---------------------------------------------------------------


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

    Agents and workers use them for connections between nodes. `secret` is the run key as text
    (`RunKey.to_text`). Host names are not checked. Raises `ConfigError` if `secret` is not a run
    key.
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
    """Return the self-signed certificate of `key` in PEM format, without the key.

    Equal keys give equal bytes on every machine, so that all processes of a run have the same one.
    """
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
