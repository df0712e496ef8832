"""The run's certificate follows from its key alone, and nothing secret stays behind."""

import ssl
import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spotfit.core.errors import ConfigError
from spotfit.ship import certificate
from spotfit.ship.sign import RunKey
from spotfit.testing.builders import RUN

SECRET = RunKey(bytes(32), RUN).to_text()


def test_every_machine_makes_the_very_same_one() -> None:
    one, two = (Ed25519PrivateKey.from_private_bytes(bytes(32)) for _ in range(2))
    other = Ed25519PrivateKey.from_private_bytes(b"x" * 32)
    assert certificate.certificate_pem(one) == certificate.certificate_pem(two)
    assert certificate.certificate_pem(one) != certificate.certificate_pem(other)


def test_both_sides_insist_on_it_and_on_nothing_older_than_tls_1_3() -> None:
    for context in certificate.contexts(SECRET, RUN):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_no_key_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    certificate.contexts(SECRET, RUN)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ConfigError):
        certificate.contexts("not a key", RUN)
