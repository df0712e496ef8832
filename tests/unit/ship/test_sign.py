"""Only who holds the run's key gives orders."""

import hashlib
import pickle

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.core.ids import RunId
from spotfit.ship.sign import RunKey
from spotfit.testing.builders import RUN

SECRET = hashlib.sha256(b"a run").digest()
KEY = RunKey(SECRET, RUN)


def test_what_was_signed_comes_back() -> None:
    assert KEY.open(KEY.seal(b"orders", purpose="luggage"), purpose="luggage") == b"orders"
    assert KEY.open(KEY.seal(b"", purpose="luggage"), purpose="luggage") == b""


def test_no_bit_of_an_envelope_can_be_changed() -> None:
    envelope = KEY.seal(b"orders", purpose="luggage")
    for position in range(len(envelope)):
        changed = bytearray(envelope)
        changed[position] ^= 1
        with pytest.raises(IntegrityError):
            KEY.open(bytes(changed), purpose="luggage")


@pytest.mark.parametrize("kept", [0, 5, 30, -1])
def test_an_envelope_cut_short_is_refused(kept: int) -> None:
    with pytest.raises(IntegrityError):
        KEY.open(KEY.seal(b"orders", purpose="luggage")[:kept], purpose="luggage")


def test_a_bare_pickle_is_refused() -> None:
    with pytest.raises(IntegrityError, match="nobody sealed it"):
        KEY.open(pickle.dumps(print), purpose="luggage")


def test_another_runs_key_is_worth_nothing() -> None:
    stranger = RunKey(bytes(32), RUN)
    with pytest.raises(IntegrityError, match="key of another run"):
        KEY.open(stranger.seal(b"orders", purpose="luggage"), purpose="luggage")


def test_an_envelope_serves_one_purpose() -> None:
    with pytest.raises(IntegrityError):
        KEY.open(KEY.seal(b"orders", purpose="result"), purpose="luggage")


def test_and_one_run_even_where_two_have_the_same_key() -> None:
    """As where SPOTFIT_RUN_SECRET names it for all."""
    other = RunKey(SECRET, RunId("another"))
    with pytest.raises(IntegrityError, match="key of another run"):
        other.open(KEY.seal(b"orders", purpose="luggage"), purpose="luggage")
    assert other.derive("wire") != KEY.derive("wire")


def test_who_has_no_key_reads_nothing() -> None:
    envelope = KEY.seal(b"AWS_SECRET_ACCESS_KEY=hunter2", purpose="luggage")
    assert b"hunter2" not in envelope
    assert b"AWS_SECRET" not in envelope


def test_what_is_sealed_again_is_the_same_and_no_nonce_serves_two() -> None:
    head = len(b"spotfit envelope 2\n")
    assert KEY.seal(b"orders", purpose="luggage") == KEY.seal(b"orders", purpose="luggage")
    nonces = {
        KEY.seal(payload, purpose=purpose)[head : head + 12]
        for payload in (b"orders", b"other orders", b"")
        for purpose in ("luggage", "result")
    }
    assert len(nonces) == 6


def test_what_another_version_sealed_is_told_as_such() -> None:
    with pytest.raises(IntegrityError, match="another version of spotfit"):
        KEY.open(b"spotfit envelope 1\n" + bytes(64), purpose="luggage")


def test_derived_keys_are_those_of_the_standard() -> None:
    theirs = HKDF(SHA256(), length=32, salt=b"spotfit run key", info=f"{RUN}\0tls".encode()).derive(
        SECRET
    )
    assert KEY.derive("tls") == theirs
    assert KEY.derive("tls") != KEY.derive("luggage")


def test_a_derived_key_cannot_forge_an_envelope() -> None:
    assert KEY.derive("luggage") != KEY.derive("seal luggage")


def test_a_key_travels_as_text() -> None:
    assert RunKey.from_text(KEY.to_text(), RUN) == KEY
    assert KEY.to_text().isprintable()


@pytest.mark.parametrize(
    "text", ["", "short", "ä" * 43, KEY.to_text()[:-4], KEY.to_text() + "AAAA"]
)
def test_other_text_is_no_key(text: str) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        RunKey.from_text(text, RUN)


def test_a_key_does_not_show_itself() -> None:
    for shown in (repr(KEY), str(KEY), f"{KEY}", repr({"key": KEY})):
        assert KEY.to_text() not in shown
        assert repr(SECRET)[2:-1] not in shown
