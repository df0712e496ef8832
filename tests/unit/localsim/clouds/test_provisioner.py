"""`sim://…` starts a simulator and delegates to the provisioner of its cloud."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.offers import list_offers
from spotfit_localsim.clouds.cloud_host import SIM_ROOT_ENV
from spotfit_localsim.clouds.provisioner import SimProvisioner, _location_settings
from spotfit_provisioners.gcp_batch.provisioner import GcpBatchProvisioner
from spotfit_provisioners.local.provisioner import LocalProvisioner
from spotfit_provisioners.local.state_dir import LocalCloudDir

pytestmark = pytest.mark.real_time("a simulated cloud runs in real time")


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[SimProvisioner]:
    sim = SimProvisioner.with_options(
        cloud="plain", root=str(tmp_path / "cloud"), nodes=3, notice_s=7.0
    )
    yield sim
    sim.call_simulator("leave")


def test_cloud_options_are_passed_to_the_cloud_only(sim: SimProvisioner) -> None:
    assert sim.plan(GroupRequest(token=Token("t-1"), num_workers=6, total_workers=6)).num_nodes == 3
    assert sim.traits.notice_s == 7.0
    assert sim.traits.observe_interval_s == sim.options.observe_s


def test_offers_are_those_of_the_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = SimProvisioner.with_options(cloud="plain", root=str(tmp_path))
    cloud = LocalProvisioner(prices={"*": {"spot": 1.5}})
    monkeypatch.setattr(SimProvisioner, "_cloud_provisioner", cloud)
    request = GroupRequest(token=Token("t-1"), num_workers=1, total_workers=1)
    (offer,) = list_offers(sim, request).offers
    assert (offer.name, offer.price and offer.price.usd_per_hour) == ("local/spot", 1.5)


def test_requested_offer_is_planned_by_the_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = SimProvisioner.with_options(cloud="gcp_batch", root=str(tmp_path))
    prices = {"*": {"spot": 1, "on_demand": 3}}
    cloud = GcpBatchProvisioner.with_options(region="r", image="i", prices=prices)
    monkeypatch.setattr(SimProvisioner, "_cloud_provisioner", cloud)
    request = GroupRequest(token=Token("t-1"), num_workers=1, total_workers=1)
    models = {}
    for offer in list_offers(sim, request).offers:
        (instance,) = sim.plan(replace(request, offer=offer)).body["allocationPolicy"]["instances"]
        models[offer.name] = instance["policy"]["provisioningModel"]
    assert models == {"gcp_batch/r/spot": "SPOT", "gcp_batch/r/on_demand": "STANDARD"}


def test_unknown_option_is_reported(tmp_path: Path) -> None:
    sim = SimProvisioner.with_options(cloud="plain", root=str(tmp_path / "cloud"), nods=3)
    with pytest.raises(ConfigError, match="nods"):
        _ = sim.traits
    sim.call_simulator("leave")


def test_local_cloud_may_use_the_directory_that_a_simulator_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in the directory of this user, which a local cloud requires to be private."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sim = SimProvisioner.with_options(cloud="plain")
    sim.start_simulator()
    sim.call_simulator("leave")
    assert sim.root.parent == LocalCloudDir.default().ensure().path


def test_two_provisioners_share_one_simulator(sim: SimProvisioner) -> None:
    other = SimProvisioner.with_options(cloud="plain", root=str(sim.root))
    assert sim.start_simulator() == other.start_simulator()


def test_stopped_simulator_restarts_at_the_same_address(sim: SimProvisioner) -> None:
    url = sim.start_simulator()
    sim.call_simulator("leave", {"machines": False})
    assert sim.start_simulator() == url


def test_machine_uses_the_simulator_of_its_own_cloud(
    sim: SimProvisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim.start_simulator()
    monkeypatch.setenv(SIM_ROOT_ENV, str(sim.root))
    assert SimProvisioner.with_options(cloud="plain", seed=9).root == sim.root


def test_machine_reaches_another_cloud_only_by_an_absolute_root(
    sim: SimProvisioner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise it would start a simulator of that cloud in the directory of its own."""
    sim.start_simulator()
    monkeypatch.setenv(SIM_ROOT_ENV, str(sim.root))
    with pytest.raises(ConfigError, match="machine of the simulated plain cannot reach"):
        SimProvisioner.with_options(cloud="aws_batch")
    other = SimProvisioner.with_options(cloud="aws_batch", root=str(tmp_path / "other"))
    assert other.root == tmp_path / "other"


def test_different_options_use_different_simulators() -> None:
    one, other = (SimProvisioner.with_options(cloud="plain", seed=seed) for seed in (1, 2))
    assert one.root != other.root


SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "a secret",
    "AWS_SESSION_TOKEN": "a token",
    "AZURE_STORAGE_ACCOUNT_KEY": "a key",
    "AZURE_STORAGE_SAS_TOKEN": "sig=1",
    "AZURE_CLIENT_SECRET": "another",
    "GOOGLE_APPLICATION_CREDENTIALS": "/keys/key.json",
}


def root() -> Path:
    return SimProvisioner.with_options(cloud="plain").root


def test_new_credentials_keep_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:password@127.0.0.1:9000/?sig=1")
    before, settings = root(), _location_settings()
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:changed@127.0.0.1:9000/?sig=2")
    assert root() == before
    assert _location_settings() == settings
    assert ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000/") in settings
    assert not {*SECRETS.values(), "password"} & {part for pair in settings for part in pair}


def test_different_endpoint_uses_a_different_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    before = root()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert root() != before


def test_failed_control_action_raises(sim: SimProvisioner) -> None:
    with pytest.raises(ConfigError, match="failed to reclaim: No machine"):
        sim.call_simulator("reclaim")
