"""The bill of a run as text, for the summary of a fit, the live output and the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spotfit.core.units import format_count, format_usd
from spotfit.model.bill import Bill, OfferBill
from spotfit.model.offer import Market, Offer

LOCAL_PROVISIONER = "local"
"""The backend whose machines are processes of this computer, which cost nothing."""

_S_PER_HOUR = 3600.0
# A share that is rounded to 0 % is not worth a word.
_MIN_SHOWN_SHARE = 0.005


def is_bill_shown(bill: Bill, provisioner: str) -> bool:
    """Whether the bill of a run is of interest: it has machine-hours that may have cost something.

    `provisioner` is the backend of the run. Machines of 'local' cost nothing, unless the user gave
    a price.
    """
    if not bill.max_machine_s:
        return False
    return provisioner != LOCAL_PROVISIONER or any(each.usd is not None for each in bill.offers)


def format_bill(bill: Bill) -> str:
    """Return the bill in one line; '' without any machine-hours.

    For example "$12.40 (at most $12.55); on demand $41.10, saved 70 %; 18.2 machine-hours; boot
    4 %, repeated 1 %, idle 2 %". Machine-hours whose price is unknown are named instead of a cost.
    The shares are those of the machine-hours.
    """
    if not bill.max_machine_s:
        return ""
    parts = [format_cost(bill)]
    if comparison := _compare_with_on_demand(bill):
        parts.append(comparison)
    if any(each.usd is not None for each in bill.offers):  # else they stand in place of the cost
        parts.append(format_machine_hours(bill.machine_s, bill.max_machine_s))
    if waste := ", ".join(_waste_shares(bill)):
        parts.append(waste)
    return "; ".join(parts)


def format_cost(bill: Bill) -> str:
    """Return the cost without further figures, such as "$12.40 (at most $12.55) so far".

    With unknown prices: "$12.40 and 5.0 machine-hours of unknown price (slurm/h100/on_demand)".
    """
    usd, max_usd = sum_known_usd(bill), sum_known_usd(bill, maximum=True)
    cost = ""
    if usd is not None and max_usd is not None:
        cost, maximum = format_usd(usd), format_usd(max_usd)
        if not usd and max_usd:  # the end of no machine is recorded yet
            cost = f"at most {maximum}"
        elif cost != maximum:
            cost = f"{cost} (at most {maximum})"
    text = " and ".join(filter(None, (cost, format_unpriced_hours(bill))))
    return text if bill.is_final else f"{text} so far"


def sum_known_usd(bill: Bill, *, maximum: bool = False) -> float | None:
    """Return the certain or the maximum cost under the offers of known price; None if none is."""
    # A maximum without a certain cost is that of hours that are shown as of unknown price.
    priced = [each for each in bill.offers if each.usd is not None]
    amounts = [each.max_usd if maximum else each.usd for each in priced]
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None


def format_short_cost(bill: Bill) -> str:
    """Return the certain cost for a column: "$12.40", "unknown", or "<$0.05" without a certain one.

    Of an unknown price in some offers only the known part is shown.
    """
    usd, max_usd = sum_known_usd(bill), sum_known_usd(bill, maximum=True)
    if usd is None:
        return "unknown"
    return f"<{format_usd(max_usd)}" if max_usd and not usd else format_usd(usd)


def format_unpriced_hours(bill: Bill) -> str:
    """Return the machine-hours of unknown price and their offers; '' if there are none.

    For example "5.0 machine-hours of unknown price (slurm/h100/on_demand)".
    """
    unknown = [each for each in bill.offers if each.usd is None and each.max_machine_s]
    if not unknown:
        return ""
    machine_s = sum(each.machine_s for each in unknown)
    hours = format_machine_hours(machine_s, sum(each.max_machine_s for each in unknown))
    # The same offer is listed several times in a sum over runs.
    names = ", ".join(dict.fromkeys(_name_of(each) for each in unknown))
    return f"{hours} of unknown price ({names})"


def list_offer_lines(bill: Bill) -> list[str]:
    """Return one line for each offer: name, machine-hours, cost and what on-demand would cost."""
    return [_format_offer(each) for each in bill.offers if each.max_machine_s]


def format_machine_hours(machine_s: float, max_machine_s: float) -> str:
    """Return certain machine-seconds for display: "18.2 machine-hours", "12 machine-minutes".

    Short times are shown in a smaller unit, because they must not look like 0. Without certain time
    it is the maximum, such as "at most 40 machine-seconds".
    """
    if not machine_s and max_machine_s:
        return f"at most {_format_machine_time(max_machine_s)}"
    return _format_machine_time(machine_s)


def _format_machine_time(machine_s: float) -> str:
    if machine_s >= _S_PER_HOUR:
        return f"{machine_s / _S_PER_HOUR:,.1f} machine-hours"
    if machine_s >= 60:
        return format_count(round(machine_s / 60), "machine-minute")
    return format_count(round(machine_s), "machine-second")


def format_offer_price(offer: Offer) -> str:
    """Return name and price of an offer, such as "aws_batch/us-east-1/q/spot, $1.20 an hour"."""
    if offer.price is None:
        return f"{offer.name}, price unknown"
    return f"{offer.name}, {format_usd(offer.price.usd_per_hour)} an hour"


def format_price_range(offers: Sequence[Offer]) -> str:
    """Return what a machine costs, such as "spot $2.10 to $3.20 an hour, on demand $12.24 an hour".

    Only known prices are considered; '' if none is known.
    """
    prices = {
        market: sorted(
            each.price.usd_per_hour for each in offers if each.price and each.market == market
        )
        for market in Market
    }
    return ", ".join(
        f"{_MARKET_TEXTS[market]} {_format_range(known[0], known[-1])} an hour"
        for market, known in prices.items()
        if known
    )


def format_share(share: float) -> str:
    """Return a share as a rounded percentage, such as "70 %"."""
    return f"{100 * share:.0f} %"


_MARKET_TEXTS = {Market.SPOT: "spot", Market.ON_DEMAND: "on demand"}


def _format_range(low: float, high: float) -> str:
    texts = format_usd(low), format_usd(high)
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _format_offer(offer: OfferBill) -> str:
    hours = format_machine_hours(offer.machine_s, offer.max_machine_s)
    # The totals contain "so far" already.
    cost = "price unknown"
    if offer.usd is not None:
        cost = format_cost(Bill(offers=(offer,), is_final=True))
    text = f"{_name_of(offer)}: {hours}, {cost}"
    if offer.on_demand_usd is not None and offer.market is Market.SPOT:
        return f"{text}; on demand {format_usd(offer.on_demand_usd)}"
    return text


def _compare_with_on_demand(bill: Bill) -> str:
    """'' if a price is unknown, and for machines that were all rented on demand."""
    share, on_demand_usd = bill.saved_share, bill.on_demand_usd
    if share is None or on_demand_usd is None:
        return ""
    if all(each.market is Market.ON_DEMAND for each in bill.offers):
        return ""
    text = f"on demand {format_usd(on_demand_usd)}"
    return f"{text}, saved {format_share(share)}" if share >= 0 else f"{text}, which is cheaper"


def _waste_shares(bill: Bill) -> Iterator[str]:
    if not bill.machine_s:
        return
    causes = {"boot": bill.boot_s, "repeated": bill.repeated_s, "idle": bill.idle_s}
    for cause, wasted_s in causes.items():
        if (share := wasted_s / bill.machine_s) >= _MIN_SHOWN_SHARE:
            yield f"{cause} {format_share(share)}"


def _name_of(offer: OfferBill) -> str:
    return offer.offer or "unknown offer"
