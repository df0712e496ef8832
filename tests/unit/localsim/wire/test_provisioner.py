"""`sim://…`: it keeps a simulator up, and has the cloud's own provisioner do the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.wire.provisioner import SimProvisioner, _shaping
from spotfit_localsim.wire.site import ROOT

pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[SimProvisioner]:
    sim = SimProvisioner.with_options(
        cloud="plain", root=str(tmp_path / "cloud"), nodes=3, notice_s=7.0
    )
    yield sim
    sim.ask("leave")


def test_options_of_the_cloud_reach_the_cloud_and_the_others_stay_here(sim: SimProvisioner) -> None:
    from spotfit.core.ids import Token
    from spotfit.model.group import GroupRequest

    assert sim.plan(GroupRequest(Token("t-1"), 6, 6)).nodes == 3
    assert sim.traits.notice_s == 7.0
    assert sim.traits.observe_s == sim.options.observe_s


def test_an_option_that_neither_has_is_told(tmp_path: Path) -> None:
    sim = SimProvisioner.with_options(cloud="plain", root=str(tmp_path / "cloud"), nods=3)
    with pytest.raises(ConfigError, match="nods"):
        _ = sim.traits
    sim.ask("leave")


def test_two_who_open_it_find_one_simulator(sim: SimProvisioner) -> None:
    other = SimProvisioner.with_options(cloud="plain", root=str(sim.root))
    assert sim.start() == other.start()


def test_one_that_died_is_started_anew_at_the_same_address(sim: SimProvisioner) -> None:
    url = sim.start()
    sim.ask("leave", {"machines": False})
    assert sim.start() == url


def test_a_machine_opens_the_cloud_it_lives_in(
    sim: SimProvisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROOT, str(sim.root))
    assert SimProvisioner.with_options(cloud="plain", seed=9).root == sim.root


def test_another_choice_is_another_cloud() -> None:
    one, other = (SimProvisioner.with_options(cloud="plain", seed=seed) for seed in (1, 2))
    assert one.root != other.root


SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "a secret",
    "AWS_SESSION_TOKEN": "a token",
    "AZURE_STORAGE_ACCOUNT_KEY": "a key",
    "AZURE_STORAGE_SAS_TOKEN": "sig=1",
    "AZURE_CLIENT_SECRET": "another",
    "GOOGLE_APPLICATION_CREDENTIALS": "/keys/mine.json",
}


def root() -> Path:
    return SimProvisioner.with_options(cloud="plain").root


def test_who_takes_new_keys_keeps_the_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:password@127.0.0.1:9000/?sig=1")
    before, told = root(), _shaping()
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:changed@127.0.0.1:9000/?sig=2")
    assert root() == before
    assert _shaping() == told
    assert ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000/") in told
    assert not {*SECRETS.values(), "password"} & {part for pair in told for part in pair}


def test_another_place_for_buckets_is_another_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    before = root()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert root() != before


def test_what_the_simulator_cannot_do_is_our_error(sim: SimProvisioner) -> None:
    with pytest.raises(ConfigError, match="could not reclaim: No machine"):
        sim.ask("reclaim")
