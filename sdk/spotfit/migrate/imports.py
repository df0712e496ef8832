"""Replacement of import statements: `rewrite_imports` translates `ray.train` imports to spotfit."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from spotfit.migrate.migration_plan import MigrationPlan, counterpart_of, is_still_needed
from spotfit.migrate.name_map import RAY_ROOT, SpotfitName, find_counterpart
from spotfit.migrate.usage_scan import SPOTFIT, ImportBinding, UsageScan, dotted_name

SmallStatement = cst.BaseSmallStatement


def rewrite_imports(
    scan: UsageScan, plan: MigrationPlan
) -> dict[cst.CSTNode, list[SmallStatement]]:
    """Return the replacement statements of each import statement of Ray."""
    statements = list(dict.fromkeys(binding.statement for binding in scan.bindings))
    rewritten: dict[cst.CSTNode, list[SmallStatement]] = {}
    for node in statements:
        own = {binding.alias: binding for binding in scan.bindings if binding.statement is node}
        if isinstance(node, cst.Import):
            rewritten[node] = _rewrite_plain_import(node, own, scan=scan, plan=plan)
        else:
            rewritten[node] = _rewrite_from_import(node, own, scan=scan, plan=plan)
    # After all rewrites: an import may already be provided by another statement of its block.
    for node in statements:
        _add_missing_imports(node, scan, plan=plan, rewritten=rewritten)
    for star, path, _ in scan.star_imports:
        counterpart = find_counterpart(path)
        if isinstance(counterpart, SpotfitName):
            rewritten[star] = [star.with_changes(module=_name_node(counterpart.module))]
    return rewritten


def _rewrite_plain_import(
    node: cst.Import,
    bindings: dict[cst.ImportAlias, ImportBinding],
    *,
    scan: UsageScan,
    plan: MigrationPlan,
) -> list[SmallStatement]:
    """Rewrite `import ray.train as t, os`: each alias separately."""
    aliases = []
    for alias in node.names:
        binding = bindings.get(alias)
        if binding is None:  # not of Ray
            aliases.append(alias)
            continue
        if alias.asname:
            counterpart = counterpart_of(binding)
        else:
            # The statement binds only `ray`, but it imports the whole dotted name: a module.
            found = find_counterpart(binding.imported_name)
            counterpart = found if isinstance(found, SpotfitName) and not found.name else None
        if counterpart is None:
            if is_still_needed(binding, scan, plan):
                aliases.append(alias)
        elif alias.asname is None and plan.spotfit_alias != SPOTFIT:
            # The root suffices: spotfit imports its public modules on first access.
            asname = _as_name(plan.spotfit_alias)
            aliases.append(alias.with_changes(name=_name_node(SPOTFIT), asname=asname))
        else:
            aliases.append(alias.with_changes(name=_name_node(counterpart.dotted)))
    return [node.with_changes(names=_with_last_comma(aliases))] if aliases else []


def _rewrite_from_import(
    node: cst.ImportFrom,
    bindings: dict[cst.ImportAlias, ImportBinding],
    *,
    scan: UsageScan,
    plan: MigrationPlan,
) -> list[SmallStatement]:
    """Rewrite `from ray.train import A, B` to one statement per target module."""
    groups: dict[str, list[cst.ImportAlias]] = {}
    modules: list[SmallStatement] = []
    for alias, binding in bindings.items():
        counterpart = counterpart_of(binding)
        if counterpart is not None and counterpart.dotted == SPOTFIT:
            # `from ray import train` becomes `import spotfit as train`.
            modules.append(_import_as(SPOTFIT, binding.local_name))
        elif counterpart is not None:
            module, _, name = counterpart.dotted.rpartition(".")
            # The local name is kept, so the uses of the name need no change.
            renamed = alias.asname is None and name != binding.local_name
            asname = _as_name(binding.local_name) if renamed else alias.asname
            groups.setdefault(module, []).append(
                alias.with_changes(name=cst.Name(name), asname=asname)
            )
        elif is_still_needed(binding, scan, plan):
            groups.setdefault(".".join(dotted_name(node.module)), []).append(alias)
    last_comma = list(bindings)[-1].comma
    return modules + [
        node.with_changes(module=_name_node(module), names=_with_last_comma(aliases, last_comma))
        for module, aliases in groups.items()
    ]


def _add_missing_imports(
    node: cst.Import | cst.ImportFrom,
    scan: UsageScan,
    *,
    plan: MigrationPlan,
    rewritten: dict[cst.CSTNode, list[SmallStatement]],
) -> None:
    """Import `spotfit` or `ray` beside `node` if uses of its names need one that is missing."""
    own = [binding for binding in scan.bindings if binding.statement is node]
    names = []
    if any(set(own) & set(use.bindings) for use in plan.spotfit_uses):
        names.append((SPOTFIT, plan.spotfit_alias))
    ray_bindings = {binding for binding in own if binding.bound_name == RAY_ROOT}
    if any(ray_bindings & set(use.bindings) for use in plan.ray_uses):
        names.append((RAY_ROOT[0], RAY_ROOT[0]))
    for module, local_name in names:
        block = _enclosing_block(node, scan)
        # Only imports of the same block: one in a function or an `if` binds the name only there.
        bound_names = {
            alias.evaluated_alias or dotted_name(alias.name)[0]
            for other, new in rewritten.items()
            if _enclosing_block(other, scan) is block
            for small in new
            if isinstance(small, cst.Import)
            for alias in small.names
        }
        if local_name not in bound_names:
            rewritten[node] = [*rewritten[node], _import_as(module, local_name)]


def _enclosing_block(node: cst.CSTNode, scan: UsageScan) -> cst.CSTNode | None:
    line = scan.parents.get(node)
    return scan.parents.get(line) if isinstance(line, cst.SimpleStatementLine) else line


def _import_as(module: str, local: str) -> cst.Import:
    asname = None if local == module else _as_name(local)
    return cst.Import(names=[cst.ImportAlias(name=_name_node(module), asname=asname)])


def _with_last_comma(
    aliases: Sequence[cst.ImportAlias], comma: cst.Comma | cst.MaybeSentinel | None = None
) -> list[cst.ImportAlias]:
    # Each alias holds its own trailing comma; the last one decides about `from x import (a, b,)`.
    end = cst.MaybeSentinel.DEFAULT if comma is None else comma
    return [*aliases[:-1], aliases[-1].with_changes(comma=end)]


def _as_name(local: str) -> cst.AsName:
    return cst.AsName(name=cst.Name(local))


def _name_node(module: str) -> cst.Name | cst.Attribute:
    first, *rest = module.split(".")
    name: cst.Name | cst.Attribute = cst.Name(first)
    for part in rest:
        name = cst.Attribute(value=name, attr=cst.Name(part))
    return name
