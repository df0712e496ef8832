"""The minimal provisioner; the rest of its behaviour is checked by the contract suite."""

from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.host.system import SystemClock, new_run_id
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.model.offer import Market
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.profile import open_provisioner
from spotfit_localsim.clouds.minimal import PlainProvisioner
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import running_simulator


def test_missing_address_is_rejected_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="url") as raised:
        open_provisioner("plain")
    assert "sim://plain" in raised.value.do


@pytest.mark.real_time("a simulated cloud uses real time")
def test_on_demand_machine_is_had_without_spot_capacity_and_billed_like_the_books(
    tmp_path: Path,
) -> None:
    with running_simulator(tmp_path / "cloud", SimOptions(boot_s=0.0, capacity=0)) as sim:
        plain = PlainProvisioner.with_options(
            url=sim.server.url, prices={"*": {"spot": 1, "on_demand": 3}}
        )
        request = GroupRequest(token=Token("t-1"), num_workers=1, total_workers=1)
        listing = plain.offers(request)
        offers = {offer.market: offer for offer in listing.offers}
        price = offers[Market.ON_DEMAND].price
        assert price is not None
        assert (price.usd_per_hour, listing.default) == (3.0, "plain/spot")
        launch = AgentLaunchSpec(str(tmp_path / "run"), new_run_id(), "secret")
        handles = {}
        for market, token in ((Market.SPOT, Token("t-2")), (Market.ON_DEMAND, Token("t-3"))):
            offer_request = GroupRequest(
                token=token, num_workers=1, total_workers=1, offer=offers[market]
            )
            handle = plain.submit(plain.plan(offer_request), launch)
            assert isinstance(handle, GroupHandle)
            handles[market] = handle
        clock = SystemClock()
        while plain.observe(handles[Market.ON_DEMAND]).nodes[0].state is not NodeState.RUNNING:
            clock.wait(0.02)
        assert plain.observe(handles[Market.SPOT]).nodes[0].state is NodeState.WAITING
        plain.cancel(handles[Market.ON_DEMAND])
        while not plain.observe(handles[Market.ON_DEMAND]).is_terminated:
            clock.wait(0.02)
        (machine,) = sim.datacenter.machines.values()
        (node,) = plain.observe(handles[Market.ON_DEMAND]).nodes
        assert machine.ended_at_s is not None
        books = (int(machine.created_at_s * 1000), int(machine.ended_at_s * 1000))
        assert (node.started_at_ms, node.ended_at_ms) == books
