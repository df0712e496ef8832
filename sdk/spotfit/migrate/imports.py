"""New import statements for old ones."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from spotfit.migrate.places import ROOT, Here, find
from spotfit.migrate.plan import Plan, moves, survives
from spotfit.migrate.survey import OURS, Binding, Survey, dotted

Small = cst.BaseSmallStatement


def new_imports(survey: Survey, plan: Plan) -> dict[cst.CSTNode, list[Small]]:
    """What takes the place of each import statement that says something of Ray."""
    statements = list(dict.fromkeys(one.statement for one in survey.bindings))
    made: dict[cst.CSTNode, list[Small]] = {}
    for node in statements:
        made[node] = _instead(node, survey, plan)
    for node in statements:
        _complete(node, survey, plan, made)
    for star, path, _ in survey.stars:
        place = find(path)
        if isinstance(place, Here):
            made[star] = [star.with_changes(module=_name(place.module))]
    return made


def _instead(node: cst.Import | cst.ImportFrom, survey: Survey, plan: Plan) -> list[Small]:
    mine = {one.alias: one for one in survey.bindings if one.statement is node}
    if isinstance(node, cst.Import):
        return _plain(node, mine, survey, plan)
    return _from(node, mine, survey, plan)


def _plain(
    node: cst.Import, mine: dict[cst.ImportAlias, Binding], survey: Survey, plan: Plan
) -> list[Small]:
    """`import ray.train as t, os`: each name by itself."""
    aliases = []
    for alias in node.names:
        binding = mine.get(alias)
        if binding is None:
            aliases.append(alias)
            continue
        place = moves(binding) if alias.asname else _module(binding)
        if place is not None:
            aliases.append(_renamed(alias, place, plan.root))
        elif survives(binding, survey, plan):
            aliases.append(alias)
    return [node.with_changes(names=_closed(aliases))] if aliases else []


def _module(binding: Binding) -> Here | None:
    place = find(binding.imported)
    whole = isinstance(place, Here) and place.parts == len(binding.imported)
    return place if whole and isinstance(place, Here) and not place.name else None


def _renamed(alias: cst.ImportAlias, place: Here, root: str) -> cst.ImportAlias:
    if alias.asname is None and root != OURS:
        return alias.with_changes(name=_name(OURS), asname=_as(root))
    return alias.with_changes(name=_name(place.dotted))


def _from(
    node: cst.ImportFrom, mine: dict[cst.ImportAlias, Binding], survey: Survey, plan: Plan
) -> list[Small]:
    """`from ray.train import A, B`: names of one module stay together."""
    groups: dict[str, list[cst.ImportAlias]] = {}
    modules: list[Small] = []
    for alias, binding in mine.items():
        place = moves(binding)
        if place is not None and not place.name and "." not in place.module:
            modules.append(_import_as(place.module, binding.local))
        elif place is not None:
            module, _, name = place.dotted.rpartition(".")
            groups.setdefault(module, []).append(_called(alias, name, binding.local))
        elif survives(binding, survey, plan):
            groups.setdefault(".".join(dotted(node.module)), []).append(alias)
    last = list(mine)[-1].comma
    return modules + [
        node.with_changes(module=_name(module), names=_closed(aliases, last))
        for module, aliases in groups.items()
    ]


def _complete(
    node: cst.Import | cst.ImportFrom,
    survey: Survey,
    plan: Plan,
    made: dict[cst.CSTNode, list[Small]],
) -> None:
    """Add what lines that use this statement's names need, and nothing in its block gives."""
    mine = [one for one in survey.bindings if one.statement is node]
    if any(set(mine) & set(use.bindings) for use in plan.ours):
        _ensure(plan.root, node, survey, made, _import_ours(plan.root))
    if any(one.path == ROOT and one in use.bindings for one in mine for use in plan.rays):
        _ensure(ROOT[0], node, survey, made, _import_as(ROOT[0], ROOT[0]))


def _ensure(
    name: str,
    node: cst.CSTNode,
    survey: Survey,
    made: dict[cst.CSTNode, list[Small]],
    statement: Small,
) -> None:
    block = _block(node, survey)
    given = [
        small for other, new in made.items() if _block(other, survey) is block for small in new
    ]
    if not any(_binds(one, name) for one in given):
        made[node] = [*made[node], statement]


def _block(node: cst.CSTNode, survey: Survey) -> cst.CSTNode | None:
    line = survey.parents.get(node)
    return survey.parents.get(line) if isinstance(line, cst.SimpleStatementLine) else line


def _binds(statement: Small, name: str) -> bool:
    return isinstance(statement, cst.Import) and any(
        (alias.evaluated_alias or dotted(alias.name)[0]) == name for alias in statement.names
    )


def _import_ours(root: str) -> cst.Import:
    return _import_as(OURS, root)


def _import_as(module: str, local: str) -> cst.Import:
    asname = None if local == module else _as(local)
    return cst.Import(names=[cst.ImportAlias(name=_name(module), asname=asname)])


def _called(alias: cst.ImportAlias, name: str, local: str) -> cst.ImportAlias:
    if alias.asname is None and name != local:
        return alias.with_changes(name=cst.Name(name), asname=_as(local))
    return alias.with_changes(name=cst.Name(name))


def _closed(
    aliases: Sequence[cst.ImportAlias], comma: cst.Comma | cst.MaybeSentinel | None = None
) -> list[cst.ImportAlias]:
    """The last one ends as the last one ended."""
    end = cst.MaybeSentinel.DEFAULT if comma is None else comma
    return [*aliases[:-1], aliases[-1].with_changes(comma=end)]


def _as(local: str) -> cst.AsName:
    return cst.AsName(name=cst.Name(local))


def _name(module: str) -> cst.Name | cst.Attribute:
    first, *rest = module.split(".")
    name: cst.Name | cst.Attribute = cst.Name(first)
    for part in rest:
        name = cst.Attribute(value=name, attr=cst.Name(part))
    return name
