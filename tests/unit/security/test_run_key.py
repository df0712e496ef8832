"""Sealing, opening and deriving with the run key."""

import hashlib
import pickle

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.core.ids import RunId
from spotfit.security.run_key import RunKey
from spotfit.testing.builders import RUN_ID

SECRET = hashlib.sha256(b"a run").digest()
KEY = RunKey(SECRET, RUN_ID)


def test_a_sealed_payload_can_be_opened() -> None:
    assert (
        KEY.open(KEY.seal(b"payload", purpose="code_bundle"), purpose="code_bundle") == b"payload"
    )
    assert KEY.open(KEY.seal(b"", purpose="code_bundle"), purpose="code_bundle") == b""


def test_any_changed_bit_of_an_envelope_is_detected() -> None:
    envelope = KEY.seal(b"payload", purpose="code_bundle")
    for position in range(len(envelope)):
        changed = bytearray(envelope)
        changed[position] ^= 1
        with pytest.raises(IntegrityError):
            KEY.open(bytes(changed), purpose="code_bundle")


@pytest.mark.parametrize("kept", [0, 5, 30, -1])
def test_a_truncated_envelope_is_rejected(kept: int) -> None:
    with pytest.raises(IntegrityError):
        KEY.open(KEY.seal(b"payload", purpose="code_bundle")[:kept], purpose="code_bundle")


def test_an_unsealed_pickle_is_rejected() -> None:
    with pytest.raises(IntegrityError, match="was not sealed"):
        KEY.open(pickle.dumps(print), purpose="code_bundle")


def test_the_key_of_another_run_is_rejected() -> None:
    other_key = RunKey(bytes(32), RUN_ID)
    with pytest.raises(IntegrityError, match="key of another run"):
        KEY.open(other_key.seal(b"payload", purpose="code_bundle"), purpose="code_bundle")


def test_an_envelope_of_another_purpose_is_rejected() -> None:
    with pytest.raises(IntegrityError):
        KEY.open(KEY.seal(b"payload", purpose="result"), purpose="code_bundle")


def test_an_envelope_of_another_run_with_the_same_key_is_rejected() -> None:
    """SPOTFIT_RUN_SECRET may be equal for several runs."""
    other = RunKey(SECRET, RunId("another"))
    with pytest.raises(IntegrityError, match="key of another run"):
        other.open(KEY.seal(b"payload", purpose="code_bundle"), purpose="code_bundle")
    assert other.derive("wire") != KEY.derive("wire")


def test_an_envelope_does_not_contain_the_payload() -> None:
    envelope = KEY.seal(b"AWS_SECRET_ACCESS_KEY=hunter2", purpose="code_bundle")
    assert b"hunter2" not in envelope
    assert b"AWS_SECRET" not in envelope


def test_equal_payloads_give_equal_envelopes_and_others_another_nonce() -> None:
    head = len(b"spotfit envelope 2\n")
    assert KEY.seal(b"payload", purpose="code_bundle") == KEY.seal(
        b"payload", purpose="code_bundle"
    )
    nonces = {
        KEY.seal(payload, purpose=purpose)[head : head + 12]
        for payload in (b"payload", b"other orders", b"")
        for purpose in ("code_bundle", "result")
    }
    assert len(nonces) == 6


def test_an_envelope_of_another_version_is_explained() -> None:
    with pytest.raises(IntegrityError, match="another version of spotfit"):
        KEY.open(b"spotfit envelope 1\n" + bytes(64), purpose="code_bundle")


def test_derived_keys_match_hkdf() -> None:
    expected = HKDF(
        SHA256(), length=32, salt=b"spotfit run key", info=f"{RUN_ID}\0tls".encode()
    ).derive(SECRET)
    assert KEY.derive("tls") == expected
    assert KEY.derive("tls") != KEY.derive("code_bundle")


def test_a_derived_key_cannot_forge_an_envelope() -> None:
    assert KEY.derive("code_bundle") != KEY.derive("seal code_bundle")


def test_a_key_round_trips_as_text() -> None:
    assert RunKey.from_text(KEY.to_text(), RUN_ID) == KEY
    assert KEY.to_text().isprintable()


@pytest.mark.parametrize(
    "text", ["", "short", "ä" * 43, KEY.to_text()[:-4], KEY.to_text() + "AAAA"]
)
def test_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="must have 32"):
        RunKey.from_text(text, RUN_ID)


def test_repr_does_not_show_the_key() -> None:
    for shown in (repr(KEY), str(KEY), f"{KEY}", repr({"key": KEY})):
        assert KEY.to_text() not in shown
        assert repr(SECRET)[2:-1] not in shown
