"""Spot and on-demand nodes as offers, and pods that are placed on them."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit_provisioners.kubernetes.offers import list_offers
from spotfit_provisioners.kubernetes.options import KubernetesOptions
from spotfit_provisioners.kubernetes.render import offer_name, plan

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def offers_of(options: KubernetesOptions) -> dict[Market, Offer]:
    return {offer.market: offer for offer in list_offers(options).offers}


def planned_job(options: KubernetesOptions, offer: Offer | None) -> dict[str, Any]:
    request = GroupRequest(token=Token("t-1"), num_workers=1, total_workers=1, offer=offer)
    return plan(request, options).body


def planned_pod(options: KubernetesOptions, market: Market | None) -> dict[str, Any]:
    offer = offers_of(options)[market] if market is not None else None
    pod: dict[str, Any] = planned_job(options, offer)["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(
    ("flavour", "label", "value"),
    [
        ("eks", "eks.amazonaws.com/capacityType", "SPOT"),
        ("karpenter", "karpenter.sh/capacity-type", "spot"),
        ("gke", "cloud.google.com/gke-spot", "true"),
        ("aks", "kubernetes.azure.com/scalesetpriority", "spot"),
    ],
)
def test_on_demand_pod_avoids_spot_nodes_of_the_platform(
    flavour: Any, label: str, value: str
) -> None:
    own = {"key": "nvidia.com/gpu", "operator": "Exists"}
    options = KubernetesOptions(
        image="i", flavour=flavour, node_selector={"pool": "a"}, tolerations=(own,)
    )
    pod = planned_pod(options, Market.ON_DEMAND)
    assert pod["nodeSelector"] == {"pool": "a"}
    assert pod["tolerations"] == [own]
    affinity = pod["affinity"]["nodeAffinity"][REQUIRED]
    assert affinity["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": label, "operator": "NotIn", "values": [value]}]}
    ]
    spot = planned_pod(options, Market.SPOT)
    assert spot == planned_pod(options, None)
    assert spot["nodeSelector"] == {label: value, "pool": "a"}


def test_nodes_without_platform_are_distinguished_by_a_selector() -> None:
    options = KubernetesOptions(
        image="i",
        node_selector={"lifecycle": "spot", INSTANCE_TYPE: "g5.xlarge"},
        on_demand_node_selector={"lifecycle": "normal"},
        prices={"g5.xlarge": {"spot": 1, "on_demand": 4}},
    )
    pod = planned_pod(options, Market.ON_DEMAND)
    assert pod["nodeSelector"] == {"lifecycle": "normal", INSTANCE_TYPE: "g5.xlarge"}
    assert "affinity" not in pod
    prices = [offer.price and offer.price.usd_per_hour for offer in offers_of(options).values()]
    assert prices == [1, 4]


@pytest.mark.parametrize(
    ("prices", "market"),
    [({}, Market.SPOT), ({"*": {"on_demand": 2}}, Market.ON_DEMAND)],
)
def test_nodes_that_are_not_distinguished_are_one_offer(
    prices: dict[str, Any], market: Market
) -> None:
    options = KubernetesOptions(image="i", prices=prices)
    listing = list_offers(options)
    assert [offer.market for offer in listing.offers] == [market]
    assert planned_pod(options, market) == planned_pod(options, None)
    is_remarked = any("on_demand_node_selector" in remark for remark in listing.remarks)
    assert is_remarked is (market is Market.SPOT)


def test_on_demand_offer_without_distinction_names_the_remedy() -> None:
    offer = offers_of(KubernetesOptions(image="i", flavour="gke"))[Market.ON_DEMAND]
    with pytest.raises(ConfigError, match="kubernetes/on_demand") as raised:
        planned_job(KubernetesOptions(image="i"), offer)
    assert "flavour" in raised.value.do


@pytest.mark.parametrize(
    "affinity", [None, {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}]}}}]
)
def test_template_cannot_place_on_demand_pods_on_spot_nodes(affinity: Any) -> None:
    options = KubernetesOptions(
        image="i", flavour="gke", pod_template={"spec": {"affinity": affinity}}
    )
    planned_pod(options, Market.SPOT)
    with pytest.raises(ConfigError, match="nodeAffinity"):
        planned_pod(options, Market.ON_DEMAND)


def test_template_may_have_other_affinities() -> None:
    template: dict[str, Any] = {"spec": {"affinity": {"podAffinity": {}}}}
    options = KubernetesOptions(image="i", flavour="gke", pod_template=template)
    pod = planned_pod(options, Market.ON_DEMAND)
    assert set(pod["affinity"]) == {"nodeAffinity", "podAffinity"}


def test_job_states_its_offer() -> None:
    options = KubernetesOptions(image="i", flavour="gke")
    for market, offer in offers_of(options).items():
        request = GroupRequest(token=Token("t-1"), num_workers=1, total_workers=1, offer=offer)
        planned = plan(request, options)
        assert planned.body["metadata"]["annotations"] == {"spotfit.dev/offer": offer.name}
        assert offer_name(planned, options) == f"kubernetes/{market.value}"
    request = GroupRequest(token=Token("t-1"), num_workers=1, total_workers=1)
    assert offer_name(plan(request, options), options) == "kubernetes/spot"
