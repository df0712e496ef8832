"""Only who holds the run's key gives orders."""

import hashlib
import pickle

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.ship.sign import RunKey

SECRET = hashlib.sha256(b"a run").digest()
KEY = RunKey(SECRET)


def test_what_was_signed_comes_back() -> None:
    assert KEY.verify(KEY.sign(b"orders", purpose="luggage"), purpose="luggage") == b"orders"
    assert KEY.verify(KEY.sign(b"", purpose="luggage"), purpose="luggage") == b""


def test_no_bit_of_an_envelope_can_be_changed() -> None:
    envelope = KEY.sign(b"orders", purpose="luggage")
    for position in range(len(envelope)):
        changed = bytearray(envelope)
        changed[position] ^= 1
        with pytest.raises(IntegrityError):
            KEY.verify(bytes(changed), purpose="luggage")


@pytest.mark.parametrize("kept", [0, 5, 30, -1])
def test_an_envelope_cut_short_is_refused(kept: int) -> None:
    with pytest.raises(IntegrityError):
        KEY.verify(KEY.sign(b"orders", purpose="luggage")[:kept], purpose="luggage")


def test_a_bare_pickle_is_refused() -> None:
    with pytest.raises(IntegrityError, match="nobody signed it"):
        KEY.verify(pickle.dumps(print), purpose="luggage")


def test_another_runs_key_is_worth_nothing() -> None:
    stranger = RunKey(bytes(32))
    with pytest.raises(IntegrityError, match="key of another run"):
        KEY.verify(stranger.sign(b"orders", purpose="luggage"), purpose="luggage")


def test_an_envelope_serves_one_purpose() -> None:
    with pytest.raises(IntegrityError):
        KEY.verify(KEY.sign(b"orders", purpose="result"), purpose="luggage")


def test_derived_keys_are_those_of_the_standard() -> None:
    theirs = HKDF(SHA256(), length=32, salt=b"spotfit run key", info=b"tls").derive(SECRET)
    assert KEY.derive("tls") == theirs
    assert KEY.derive("tls") != KEY.derive("luggage")


def test_a_derived_key_cannot_forge_an_envelope() -> None:
    assert KEY.derive("luggage") != KEY.derive("sign luggage")


def test_a_key_travels_as_text() -> None:
    assert RunKey.from_text(KEY.to_text()) == KEY
    assert KEY.to_text().isprintable()


@pytest.mark.parametrize(
    "text", ["", "short", "ä" * 43, KEY.to_text()[:-4], KEY.to_text() + "AAAA"]
)
def test_other_text_is_no_key(text: str) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        RunKey.from_text(text)


def test_a_key_does_not_show_itself() -> None:
    for shown in (repr(KEY), str(KEY), f"{KEY}", repr({"key": KEY})):
        assert KEY.to_text() not in shown
        assert repr(SECRET)[2:-1] not in shown
