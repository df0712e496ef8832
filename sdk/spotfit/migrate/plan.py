"""What becomes of each thing a script says of Ray: judgement only, the text stays as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import libcst as cst

from spotfit.migrate.places import (
    LIFE_OF_A_CLUSTER,
    NO_DATASETS,
    ROOT,
    Here,
    Path,
    Stays,
    find,
    variable,
    what_holds,
)
from spotfit.migrate.survey import OURS, Binding, Survey, Use, head

_TRAINERS = ("DataParallelTrainer", "TorchTrainer")
_VARIABLE = re.compile(r"\bRAY_(?:TRAIN|AIR|CHDIR)_[A-Z0-9_]+")
_A_MODULE = re.compile(r"ray\.(?:train|air)(?:\.\w+)*")


@dataclass(frozen=True, order=True, slots=True)
class Note:
    """Something to tell of a line: what was dropped, or what is left for a hand to do."""

    line: int
    what: str
    do: str
    by_hand: bool = True


@dataclass(slots=True)
class Plan:
    """What is to be done. Nodes are those of the parsed script."""

    root: str
    """The name under which new lines know us."""
    swaps: dict[cst.CSTNode, str] = field(default_factory=dict)
    """Expressions, and the text that takes their place."""
    ours: list[Use] = field(default_factory=list)
    """Uses that now need us to be imported."""
    rays: list[Use] = field(default_factory=list)
    """Uses that still need Ray."""
    drops: set[cst.CSTNode] = field(default_factory=set)
    """Statements that go."""
    notes: list[Note] = field(default_factory=list)


def make_plan(survey: Survey) -> Plan:
    """Decide about everything that was found."""
    plan = Plan(root=f"_{OURS}" if survey.our_name_is_taken else OURS)
    for use in survey.uses:
        _decide(use, plan)
    _drop_the_cluster(survey, plan)
    plan.notes += [
        Note(use.line, ".".join(use.path), _why(use), by_hand=not _about_the_cluster(use))
        for use in plan.rays
    ]
    plan.notes += _left_imports(survey, plan)
    plan.notes += _datasets(survey)
    for node, value, line in survey.texts:
        _decide_text(node, value, line, plan)
    plan.notes = sorted(set(plan.notes))
    return plan


def trainers_that_stay(survey: Survey) -> list[Note]:
    """Trainers of Ray that have no counterpart; a script that has one had better stay whole, for
    they would be given configurations of ours."""
    paths = {(use.line, use.path) for use in survey.uses}
    paths |= {(one.line, one.imported) for one in survey.bindings if not _is_used(one, survey.uses)}
    return [
        Note(line, ".".join(path), "This trainer stays with Ray; so does the whole script.")
        for line, path in sorted(paths)
        if path[1:2] == ("train",) and isinstance(find(path), Stays) and _names_a_trainer(path)
    ]


def _names_a_trainer(path: Path) -> bool:
    return any(part.endswith("Trainer") for part in path)


def moves(binding: Binding) -> Here | None:
    """Where the bound thing itself is here, if it is: then the name stays, and means ours."""
    if binding.path == ROOT:
        return None
    place = find(binding.path)
    whole = isinstance(place, Here) and place.parts == len(binding.path)
    return place if whole and isinstance(place, Here) and "(" not in place.name else None


def survives(binding: Binding, survey: Survey, plan: Plan) -> bool:
    """Whether that name of Ray is still needed; one that is never used may be meant for others."""
    return _is_used(binding, plan.rays) or _only_bound(binding, survey)


def _decide(use: Use, plan: Plan) -> None:
    binding, place = use.bindings[0], find(use.path)
    home = moves(binding)
    if home is not None and isinstance(place, Stays):
        plan.notes.append(Note(use.line, ".".join(use.path), place.do))
    elif isinstance(place, Stays) or (home is None and not use.sure):
        plan.rays.append(use)
    elif home is None:
        plan.ours.append(use)
        _swap(use, place, plan.root + place.dotted.removeprefix(OURS), plan)
    elif not home.name:
        _swap(use, place, use.written[0] + place.dotted.removeprefix(home.module), plan)


def _swap(use: Use, place: Here, text: str, plan: Plan) -> None:
    length = place.parts - len(use.bindings[0].path) + 1
    old = ".".join(use.written[:length])
    if text == old:
        return
    if use.within:
        quoted = plan.swaps.get(use.node, cst.ensure_type(use.node, cst.SimpleString).value)
        plan.swaps[use.node] = re.sub(rf"\b{re.escape(old)}\b", text, quoted)
    elif use.sure:
        plan.swaps[head(use.node, length)] = text
    else:
        plan.notes.append(Note(use.line, old, _why(use)))


def _why(use: Use) -> str:
    place = find(use.path)
    if isinstance(place, Stays):
        return place.do
    return (
        f"`{use.written[0]}` may be something else here: change this line by hand, "
        f"to {place.dotted}."
    )


def _about_the_cluster(use: Use) -> bool:
    return use.path in LIFE_OF_A_CLUSTER


def _drop_the_cluster(survey: Survey, plan: Plan) -> None:
    """Let `ray.init()` and its like go, if the script needs Ray for nothing else."""
    still = [use for use in plan.rays if not _about_the_cluster(use)]
    idle = [one for one in survey.bindings if _only_bound(one, survey)]
    if still or idle or any(isinstance(find(path), Stays) for _, path, _ in survey.stars):
        return
    statements = {use: _whole_statement(use, survey) for use in plan.rays}
    if not all(statements.values()):
        return
    for use, statement in statements.items():
        if statement is not None:
            plan.drops.add(statement)
        plan.notes.append(_dropped(use, survey))
    plan.rays.clear()


def _only_bound(binding: Binding, survey: Survey) -> bool:
    """Whether it is imported as something that stays with Ray, and then not used."""
    stays = binding.imported != ROOT and isinstance(find(binding.imported), Stays)
    return stays and not _is_used(binding, survey.uses)


def _is_used(binding: Binding, uses: Iterable[Use]) -> bool:
    """`import ray.data` is used where `ray.data` is, not wherever `ray` is."""
    mine = [use for use in uses if binding in use.bindings]
    if binding.path == binding.imported:
        return bool(mine)
    return any(use.path[: len(binding.imported)] == binding.imported for use in mine)


def _whole_statement(use: Use, survey: Survey) -> cst.CSTNode | None:
    """The statement that does nothing but call this; None if the call is part of something."""
    call = survey.parents.get(use.node)
    above = survey.parents.get(call) if isinstance(call, cst.Call) else None
    if isinstance(above, cst.Expr):
        return above
    if isinstance(above, cst.UnaryOperation):
        above = survey.parents.get(above)
    return above if isinstance(above, cst.If) and _only_starts_or_ends(above, survey) else None


def _only_starts_or_ends(node: cst.If, survey: Survey) -> bool:
    """`if not ray.is_initialized(): ray.init()`, and nothing more."""
    calls = {survey.parents.get(use.node) for use in survey.uses if _about_the_cluster(use)}
    statements = [
        small
        for line in node.body.body
        for small in (line.body if isinstance(line, cst.SimpleStatementLine) else [line])
    ]
    return node.orelse is None and all(
        isinstance(one, cst.Expr) and one.value in calls for one in statements
    )


def _dropped(use: Use, survey: Survey) -> Note:
    call = survey.parents.get(use.node)
    given = (
        [one.keyword.value for one in call.args if one.keyword]
        if isinstance(call, cst.Call)
        else []
    )
    what = f"{'.'.join(use.path)}()"
    if "runtime_env" in given:
        do = "dropped; pass what its runtime_env held as RunConfig(worker_runtime_env=...)."
        return Note(use.line, what, do)
    return Note(use.line, what, "dropped: there is no cluster to start or stop.", by_hand=False)


def _left_imports(survey: Survey, plan: Plan) -> Iterator[Note]:
    """Imports of Ray that nothing here uses, and stars: their names are used, who knows where."""
    for binding in survey.bindings:
        if _only_bound(binding, survey):
            place = find(binding.imported)
            yield Note(binding.line, ".".join(binding.imported), _do(place))
    for _, path, line in survey.stars:
        place = find(path)
        if isinstance(place, Stays):
            yield Note(line, f"from {'.'.join(path)} import *", place.do)


def _do(place: Here | Stays) -> str:
    return place.do if isinstance(place, Stays) else ""


def _datasets(survey: Survey) -> Iterator[Note]:
    for use in survey.uses:
        call, place = survey.parents.get(use.node), find(use.path)
        if isinstance(call, cst.Call) and isinstance(place, Here) and place.name in _TRAINERS:
            given = [argument.keyword.value for argument in call.args if argument.keyword]
            if "datasets" in given:
                yield Note(use.line, f"{place.name}(datasets=...)", NO_DATASETS)


def _decide_text(node: cst.SimpleString, value: str, line: int, plan: Plan) -> None:
    ours = variable(value)
    if ours is not None:
        plan.swaps[node] = node.value.replace(value, ours)
        return
    for name in _VARIABLE.findall(value):
        instead = variable(name)
        do = f"Write {instead}." if instead else f"Without effect: {what_holds(name)}."
        plan.notes.append(Note(line, name, do))
    if _A_MODULE.fullmatch(value):
        place = find(tuple(value.split(".")))
        do = f"It is {place.dotted} here." if isinstance(place, Here) else place.do
        plan.notes.append(Note(line, repr(value), f"A text that may name a module. {do}"))
