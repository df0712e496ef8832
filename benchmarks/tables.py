"""What was kept, as tables of markdown. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("figure", "ours", "peer (default)", "peer (tuned)", "ratio (95 % lower)", "asked for")


def of_figure(kept: Mapping[str, Any]) -> str:
    """Every race of one figure: both sides' medians and ranges, wall and CPU."""
    unit = kept["unit"]
    rows = [
        (
            race["rival"],
            _spread(race["ours"], unit),
            _spread(race["theirs"], unit),
            _ratio(race["ratio"], race["lower"]),
            f"{race['ours']['cpu_s']:.2f} / {race['theirs']['cpu_s']:.2f}",
            _ratio(race["cpu_ratio"], race["cpu_lower"]),
            _went(race["ours"]) + " / " + _went(race["theirs"]),
            _bar(race["asked"], race["lower"]),
        )
        for race in kept["races"]
    ]
    if kept["alone"] is not None:
        alone = kept["alone"]
        row = ("-", _spread(alone, unit), "-", "-", f"{alone['cpu_s']:.2f}", "-", _went(alone))
        rows.append((*row, _limit(kept, alone)))
    head = ("peer", "ours", "theirs", "ratio (95 % lower)", "CPU-s", "CPU ratio", "ended well")
    return f"**{kept['title']}**\n\n" + markdown((*head, "asked for"), rows) + _also(kept)


def _also(kept: Mapping[str, Any]) -> str:
    rows = [
        (
            race["rival"],
            also["words"],
            f"{also['ours']:.3g}",
            f"{also['theirs']:.3g}",
            _ratio(also["ratio"], also["lower"]),
        )
        for race in kept["races"]
        for also in race["also"]
        if also["pairs"]
    ]
    head = ("peer", "also", "ours", "theirs", "ratio (95 % lower)")
    return "\n" + markdown(head, rows) if rows else ""


def summary(every: Sequence[Mapping[str, Any]]) -> str:
    """The table of the README: a row for each figure and family of peers."""
    rows = []
    for kept in every:
        if "claims" in kept:
            rows += [_row_of_claim(kept, claim) for claim in kept["claims"]]
            continue
        families = sorted({race["rival"].partition("-")[0] for race in kept["races"]}, reverse=True)
        rows += [_family_row(kept, family) for family in families]
        if kept["alone"] is not None:
            rows.append(_row_of_ours(kept))
        if "said" in kept:
            asked = f"no invariant broken: {_so(kept['held'])}"
            rows.append((kept["title"], kept["said"], "-", "-", "-", asked))
    return markdown(HEAD, rows)


def _family_row(kept: Mapping[str, Any], family: str) -> tuple[str, ...]:
    """Claimed is the ratio to the better of the peer's settings: the smaller of the two."""
    races = {
        race["rival"].partition("-")[2]: race
        for race in kept["races"]
        if race["rival"].startswith(family + "-")
    }
    claimed = min(races.values(), key=lambda race: race["lower"])
    bars = [race["asked"] for race in races.values() if race["asked"] is not None]
    return (
        f"{kept['title']}, against {family}",
        _number(claimed["ours"]["median"], kept["unit"]),
        _peer(races.get("default"), kept["unit"]),
        _peer(races.get("tuned"), kept["unit"]),
        _ratio(claimed["ratio"], claimed["lower"]),
        _all_asked(kept, claimed["ours"], _bar(max(bars, default=None), claimed["lower"])),
    )


def _row_of_claim(kept: Mapping[str, Any], claim: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{kept['title']}: {claim['words']}",
        _number(claim["ours"], "s"),
        "-",
        _number(claim["theirs"], "s"),
        _ratio(claim["ratio"], claim["lower"]),
        _bar(claim["asked"], claim["lower"]),
    )


def _row_of_ours(kept: Mapping[str, Any]) -> tuple[str, ...]:
    ours = _number(kept["alone"]["median"], kept["unit"]) + f" ({_went(kept['alone'])})"
    return (kept["title"], ours, "-", "-", "-", _limit(kept, kept["alone"]))


def _all_asked(kept: Mapping[str, Any], ours: Mapping[str, Any], bar: str) -> str:
    return bar if kept["at_most"] is None else f"{_limit(kept, ours)}, {bar}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _peer(race: Mapping[str, Any] | None, unit: str) -> str:
    if race is None:
        return "-"
    found = _number(race["theirs"]["median"], unit)
    unwell = race["theirs"]["ok"] < race["theirs"]["runs"]
    return f"{found} ({_went(race['theirs'])} ended well)" if unwell else found


def _spread(side: Mapping[str, Any], unit: str) -> str:
    return f"{_number(side['median'], unit)} ({side['least']:.3g}-{side['most']:.3g})"


def _number(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def _ratio(median: float, lower: float) -> str:
    return f"{median:,.3g}x ({lower:,.3g})"


def _went(side: Mapping[str, Any]) -> str:
    """How many runs ended well; and how many kills were survived, where there were kills."""
    runs = f"{side['ok']} of {side['runs']}"
    kills = sum(more.get("kills", 0) for more in side["more"])
    if not kills:
        return runs
    survived = sum(more["recovered"] for more in side["more"] if more)
    return f"{runs}, {survived} of {kills} kills"


def _bar(asked: float | None, lower: float) -> str:
    if asked is None:
        return "-"
    return f"≥ {asked:,g}x: {_so(lower >= asked)}"


def _limit(kept: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if kept["at_most"] is None:
        return "-"
    return f"≤ {kept['at_most']:g} {kept['unit']}: {_so(ours['median'] <= kept['at_most'])}"


def _so(reached: bool) -> str:  # noqa: FBT001  # the one question it answers
    return "reached" if reached else "missed"
