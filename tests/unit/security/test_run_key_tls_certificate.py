"""The run's certificate is derived from the run key, and no key is left on disk."""

import ssl
import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spotfit.core.errors import ConfigError
from spotfit.security import run_key
from spotfit.security.run_key import RunKey
from spotfit.testing.builders import RUN_ID

SECRET = RunKey(bytes(32), RUN_ID).to_text()


def test_the_certificate_is_equal_on_every_machine() -> None:
    one, two = (Ed25519PrivateKey.from_private_bytes(bytes(32)) for _ in range(2))
    other = Ed25519PrivateKey.from_private_bytes(b"x" * 32)
    assert run_key.self_signed_certificate_pem(one) == run_key.self_signed_certificate_pem(two)
    assert run_key.self_signed_certificate_pem(one) != run_key.self_signed_certificate_pem(other)


def test_both_sides_require_the_certificate_and_tls_1_3() -> None:
    for context in run_key.make_tls_contexts(SECRET, RUN_ID):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_no_key_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_key.make_tls_contexts(SECRET, RUN_ID)
    assert list(tmp_path.iterdir()) == []


def test_invalid_keys_are_rejected() -> None:
    with pytest.raises(ConfigError):
        run_key.make_tls_contexts("not a key", RUN_ID)
