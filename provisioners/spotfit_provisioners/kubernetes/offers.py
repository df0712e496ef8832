"""The offers of a cluster: pods on its spot nodes and on its on-demand nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotfit.model.offer import Market, Offer
from spotfit.provision.offers import OfferListing
from spotfit_provisioners.kubernetes.options import KubernetesOptions
from spotfit_provisioners.prices.given import (
    given_market,
    own_machine_listing,
    own_machine_offer,
)

# https://kubernetes.io/docs/reference/labels-annotations-taints/#nodekubernetesioinstance-type
_INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"

# Label of spot nodes by platform, its value, and whether the nodes also have it as a taint.
_SPOT_NODES: Mapping[str, tuple[str, str, bool]] = {
    "": ("", "", False),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT", False),
    "karpenter": ("karpenter.sh/capacity-type", "spot", False),
    "gke": ("cloud.google.com/gke-spot", "true", True),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot", True),
}


def list_offers(options: KubernetesOptions, *, now_s: float = 0.0) -> OfferListing:
    """Return a spot and an on-demand offer, or one if the options do not distinguish their nodes.

    `now_s` is the time of the given prices, in seconds since 1970-01-01 UTC.
    """
    default = _default_market(options)
    markets = tuple(Market) if _has_both_markets(options) else (default,)
    offers = [_offer(options, market, now_s) for market in markets]
    remarks = []
    if markets == (Market.SPOT,):
        remarks.append(
            "Pods on on-demand nodes cannot be requested: set KubernetesOptions(flavour=…), or "
            "on_demand_node_selector."
        )
    names = {offer.market: offer.name for offer in offers}
    return own_machine_listing(offers, default=names[default], remarks=remarks)


def node_fields(options: KubernetesOptions, market: Market | None) -> dict[str, Any]:
    """Return the fields of a pod that select the nodes of the market; None is the default one."""
    label, value, is_tainted = _SPOT_NODES[options.flavour]
    tolerations = [dict(one) for one in options.tolerations]
    selector = _node_selector(options, market or _default_market(options))
    if market is Market.ON_DEMAND and _has_both_markets(options):
        # NotIn also matches nodes without the label. A pod without any requirement could get a
        # spot node, because not all platforms have taints on them:
        # https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#operators
        term = {"matchExpressions": [{"key": label, "operator": "NotIn", "values": [value]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        affinity = {"nodeAffinity": required} if label else {}
        return {"nodeSelector": selector, "tolerations": tolerations, "affinity": affinity}
    taint = {"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"}
    return {
        "nodeSelector": {**({label: value} if label else {}), **selector},
        "tolerations": [*([taint] if is_tainted else []), *tolerations],
    }


def _offer(options: KubernetesOptions, market: Market, now_s: float) -> Offer:
    return own_machine_offer(
        options.provisioner,
        options.prices,
        market,
        machine_type=_node_selector(options, market).get(_INSTANCE_TYPE_LABEL, ""),
        now_s=now_s,
    )


def _has_both_markets(options: KubernetesOptions) -> bool:
    return bool(options.flavour or options.on_demand_node_selector)


def _default_market(options: KubernetesOptions) -> Market:
    """Return the market of pods that are requested without an offer."""
    if _has_both_markets(options):
        return Market.SPOT
    machine_type = options.node_selector.get(_INSTANCE_TYPE_LABEL, "")
    return given_market(options.prices, machine_type, default=Market.SPOT)


def _node_selector(options: KubernetesOptions, market: Market) -> dict[str, str]:
    """Return the user's node labels for the market."""
    if market is Market.ON_DEMAND:
        return {**options.node_selector, **options.on_demand_node_selector}
    return dict(options.node_selector)
