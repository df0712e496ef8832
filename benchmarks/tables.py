"""Markdown tables of results. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("figure", "ours", "peer (default)", "peer (tuned)", "ratio (95 % lower)", "target")


def of_figure(result: Mapping[str, Any]) -> str:
    """Return all comparisons of one figure: medians, ranges and CPU time of both sides."""
    unit = result["unit"]
    rows = [
        (
            comparison["peer"],
            _spread(comparison["ours"], unit),
            _spread(comparison["theirs"], unit),
            _ratio(comparison["ratio"], comparison["lower"]),
            f"{comparison['ours']['cpu_s']:.2f} / {comparison['theirs']['cpu_s']:.2f}",
            _ratio(comparison["cpu_ratio"], comparison["cpu_lower"]),
            _success_count(comparison["ours"]) + " / " + _success_count(comparison["theirs"]),
            _target(comparison["target"], comparison["lower"]),
        )
        for comparison in result["comparisons"]
    ]
    if result["alone"] is not None:
        alone = result["alone"]
        row = (
            "-",
            _spread(alone, unit),
            "-",
            "-",
            f"{alone['cpu_s']:.2f}",
            "-",
            _success_count(alone),
        )
        rows.append((*row, _limit(result, alone)))
    head = ("peer", "ours", "theirs", "ratio (95 % lower)", "CPU-s", "CPU ratio", "succeeded")
    return f"**{result['title']}**\n\n" + markdown((*head, "target"), rows) + _also(result)


def _also(result: Mapping[str, Any]) -> str:
    rows = [
        (
            comparison["peer"],
            also["title"],
            f"{also['ours']:.3g}",
            f"{also['theirs']:.3g}",
            _ratio(also["ratio"], also["lower"]),
        )
        for comparison in result["comparisons"]
        for also in comparison["also"]
        if also["pairs"]
    ]
    head = ("peer", "also", "ours", "theirs", "ratio (95 % lower)")
    return "\n" + markdown(head, rows) if rows else ""


def summary(every: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the README: one row per figure and peer."""
    rows = []
    for result in every:
        if "claims" in result:
            rows += [_row_of_claim(result, claim) for claim in result["claims"]]
            continue
        families = sorted(
            {comparison["peer"].partition("-")[0] for comparison in result["comparisons"]},
            reverse=True,
        )
        rows += [_family_row(result, family) for family in families]
        if result["alone"] is not None:
            rows.append(_row_of_spotfit(result))
        if "output" in result:
            target = f"no invariant broken: {_reached_or_missed(result['passed'])}"
            rows.append((result["title"], result["output"], "-", "-", "-", target))
    return markdown(HEAD, rows)


def _family_row(result: Mapping[str, Any], family: str) -> tuple[str, ...]:
    """Return the row of a peer; the claim is the ratio to the better of its settings."""
    comparisons = {
        comparison["peer"].partition("-")[2]: comparison
        for comparison in result["comparisons"]
        if comparison["peer"].startswith(family + "-")
    }
    claimed = min(comparisons.values(), key=lambda comparison: comparison["lower"])
    targets = [
        comparison["target"]
        for comparison in comparisons.values()
        if comparison["target"] is not None
    ]
    return (
        f"{result['title']}, against {family}",
        _number(claimed["ours"]["median"], result["unit"]),
        _peer(comparisons.get("default"), result["unit"]),
        _peer(comparisons.get("tuned"), result["unit"]),
        _ratio(claimed["ratio"], claimed["lower"]),
        _all_targets(
            result, claimed["ours"], _target(max(targets, default=None), claimed["lower"])
        ),
    )


def _row_of_claim(result: Mapping[str, Any], claim: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{result['title']}: {claim['title']}",
        _number(claim["ours"], "s"),
        "-",
        _number(claim["theirs"], "s"),
        _ratio(claim["ratio"], claim["lower"]),
        _target(claim["target"], claim["lower"]),
    )


def _row_of_spotfit(result: Mapping[str, Any]) -> tuple[str, ...]:
    ours = (
        _number(result["alone"]["median"], result["unit"]) + f" ({_success_count(result['alone'])})"
    )
    return (result["title"], ours, "-", "-", "-", _limit(result, result["alone"]))


def _all_targets(result: Mapping[str, Any], ours: Mapping[str, Any], target: str) -> str:
    return target if result["at_most"] is None else f"{_limit(result, ours)}, {target}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _peer(comparison: Mapping[str, Any] | None, unit: str) -> str:
    if comparison is None:
        return "-"
    found = _number(comparison["theirs"]["median"], unit)
    has_failures = comparison["theirs"]["ok"] < comparison["theirs"]["runs"]
    return f"{found} ({_success_count(comparison['theirs'])} succeeded)" if has_failures else found


def _spread(side: Mapping[str, Any], unit: str) -> str:
    return f"{_number(side['median'], unit)} ({side['min']:.3g}-{side['max']:.3g})"


def _number(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def _ratio(median: float, lower: float) -> str:
    return f"{median:,.3g}x ({lower:,.3g})"


def _success_count(side: Mapping[str, Any]) -> str:
    """Return the number of successful runs, and of survived kills if there were any."""
    runs = f"{side['ok']} of {side['runs']}"
    kills = sum(more.get("kills", 0) for more in side["more"])
    if not kills:
        return runs
    survived = sum(more["recovered"] for more in side["more"] if more)
    return f"{runs}, {survived} of {kills} kills"


def _target(target: float | None, lower: float) -> str:
    if target is None:
        return "-"
    return f"≥ {target:,g}x: {_reached_or_missed(lower >= target)}"


def _limit(result: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if result["at_most"] is None:
        return "-"
    reached = ours["median"] <= result["at_most"]
    return f"≤ {result['at_most']:g} {result['unit']}: {_reached_or_missed(reached)}"


def _reached_or_missed(reached: bool) -> str:  # noqa: FBT001  # the only argument
    return "reached" if reached else "missed"
