"""Decisions of the migration: which nodes are replaced or deleted, and which notes are shown.

`make_plan` is a pure function of a `UsageScan`; `edit` applies the plan.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import libcst as cst

from spotfit.core.unsupported_names import UNSUPPORTED_ARGUMENTS
from spotfit.migrate.name_map import (
    CHANGED_CALLS,
    CLUSTER_LIFECYCLE,
    RAY_ROOT,
    REMOVED_ARGUMENTS,
    NoCounterpart,
    SpotfitName,
    explain_ignored_variable,
    find_counterpart,
    find_variable,
)
from spotfit.migrate.usage_scan import SPOTFIT, ImportBinding, RayUse, UsageScan, chain_head

_ENVIRONMENT_KEYS = {"env_vars", "pip", "py_modules", "working_dir"}
# Beside RAY_TRAIN_* and RAY_AIR_*, Ray Train reads RAY_CHDIR_TO_TRIAL_DIR.
_RAY_VARIABLE_PATTERN = re.compile(r"\bRAY_(?:TRAIN|AIR|CHDIR)_[A-Z0-9_]+")
_RAY_MODULE_PATTERN = re.compile(r"ray\.(?:train|air)(?:\.\w+)*")


@dataclass(frozen=True, order=True, slots=True)
class MigrationNote:
    """A message about a line: removed code, or a manual change that is required."""

    line: int
    what: str
    do: str
    is_manual: bool = True
    cell: int = 0
    """In a notebook the number of the code cell, from 1, to which `line` is relative; else 0."""

    @property
    def location(self) -> str:
        """The place for display: "line 3", or in a notebook "code cell 2, line 3"."""
        return f"code cell {self.cell}, line {self.line}" if self.cell else f"line {self.line}"


@dataclass(slots=True)
class MigrationPlan:
    """All changes to a script. Nodes are those of the parsed script."""

    spotfit_alias: str
    """Local name of the spotfit package in new lines."""
    replacements: dict[cst.CSTNode, str] = field(default_factory=dict)
    """Expressions and their new text."""
    spotfit_uses: list[RayUse] = field(default_factory=list)
    """Uses that require `import spotfit`."""
    ray_uses: list[RayUse] = field(default_factory=list)
    """Uses that still require `import ray`."""
    deletions: set[cst.CSTNode] = field(default_factory=set)
    """Statements to delete."""
    new_arguments: dict[cst.Call, tuple[str, cst.Dict]] = field(default_factory=dict)
    """Calls, and the keyword argument to append to each: its name and value."""
    notes: list[MigrationNote] = field(default_factory=list)


def make_plan(scan: UsageScan) -> MigrationPlan:
    """Return all changes and notes for a scanned script, except the new import statements.

    Pure: neither the scan nor the syntax tree is changed. Notes are sorted by line.
    """
    plan = MigrationPlan(spotfit_alias=f"_{SPOTFIT}" if scan.is_spotfit_taken else SPOTFIT)
    for use in scan.uses:
        _plan_use(use, plan)
    # After all uses: cluster calls are deleted only if nothing else needs Ray.
    _drop_cluster_calls(scan, plan)
    plan.notes += [
        MigrationNote(
            use.line, ".".join(use.ray_name), _explain(use), is_manual=not _is_cluster_call(use)
        )
        for use in plan.ray_uses
    ]
    plan.notes += _unused_import_notes(scan)
    plan.notes += _argument_notes(scan)
    for node, value, line in scan.strings:
        _plan_string(node, value, line=line, plan=plan)
    # A name may be used several times on a line; one note is enough.
    plan.notes = sorted(set(plan.notes))
    return plan


def unsupported_trainers(scan: UsageScan) -> list[MigrationNote]:
    """Return a note for each Ray trainer without an equivalent; usually an empty list.

    A script with such a trainer is left unchanged, because a Ray trainer does not accept spotfit's
    configuration objects.
    """
    # Imports count only if they are not used: otherwise the notes name the lines of the uses.
    paths = {(use.line, use.ray_name) for use in scan.uses}
    paths |= {
        (each.line, each.imported_name) for each in scan.bindings if not _is_used(each, scan.uses)
    }
    return [
        MigrationNote(
            line,
            ".".join(path),
            f"{counterpart.do} The script was not changed, because spotfit has no such trainer.",
        )
        for line, path in sorted(paths)
        if path[1:2] == ("train",)
        and isinstance(counterpart := find_counterpart(path), NoCounterpart)
        and any(part.endswith("Trainer") for part in path)
    ]


def counterpart_of(binding: ImportBinding) -> SpotfitName | None:
    """Return the spotfit equivalent of the object that an import binds; None without one.

    If there is one, the local name is kept and bound to the equivalent. None for the packages `ray`
    and `horovod` themselves.
    """
    if len(binding.bound_name) == 1:
        return None
    counterpart = find_counterpart(binding.bound_name)
    # A call such as `get_context().get_world_rank` cannot be imported under a name.
    if not isinstance(counterpart, SpotfitName) or "(" in counterpart.name:
        return None
    return counterpart if counterpart.matched_parts == len(binding.bound_name) else None


def is_still_needed(binding: ImportBinding, scan: UsageScan, plan: MigrationPlan) -> bool:
    """Return whether an import of Ray must remain after the changes of `plan`.

    True if a use still requires Ray, and for an import without an equivalent that the script never
    uses: other modules may import the name.
    """
    return _is_used(binding, plan.ray_uses) or _is_unused_import(binding, scan)


def _plan_use(use: RayUse, plan: MigrationPlan) -> None:
    binding, counterpart = use.bindings[0], find_counterpart(use.ray_name)
    bound = counterpart_of(binding)
    # (1) The bound object exists in spotfit, but not the used attribute: the user must decide.
    # (2) The name remains bound to Ray. (3) The chain starts at `ray` and is rewritten to start at
    # `spotfit`. (4) The local name is rebound to a spotfit module; only the rest may change, unless
    # the name is in another module.
    if bound is not None and isinstance(counterpart, NoCounterpart):
        plan.notes.append(MigrationNote(use.line, ".".join(use.ray_name), counterpart.do))
    elif isinstance(counterpart, NoCounterpart) or (bound is None and not use.is_certain):
        plan.ray_uses.append(use)
    elif bound is None:
        plan.spotfit_uses.append(use)
        text = plan.spotfit_alias + counterpart.dotted.removeprefix(SPOTFIT)
        _plan_replacement(use, counterpart, text=text, plan=plan)
    elif not bound.name and not f"{counterpart.module}.".startswith(f"{bound.module}."):
        # The name is in another module of spotfit than those beside it, as predictors are.
        plan.spotfit_uses.append(use)
        text = plan.spotfit_alias + counterpart.dotted.removeprefix(SPOTFIT)
        _plan_replacement(use, counterpart, text=text, plan=plan)
    elif not bound.name:
        text = use.source_name[0] + counterpart.dotted.removeprefix(bound.module)
        _plan_replacement(use, counterpart, text=text, plan=plan)


def _plan_replacement(
    use: RayUse, counterpart: SpotfitName, *, text: str, plan: MigrationPlan
) -> None:
    # Number of source names that the counterpart replaces; the local name stands for all parts of
    # the bound name.
    length = counterpart.matched_parts - len(use.bindings[0].bound_name) + 1
    old = ".".join(use.source_name[:length])
    if text == old:
        return
    # A quoted annotation is a string node: only the name within its text is replaced.
    if use.annotation_text:
        quoted = plan.replacements.get(use.node, cst.ensure_type(use.node, cst.SimpleString).value)
        plan.replacements[use.node] = re.sub(rf"\b{re.escape(old)}\b", text, quoted)
    elif use.is_certain:
        plan.replacements[chain_head(use.node, length)] = text
    else:
        plan.notes.append(MigrationNote(use.line, old, _explain(use)))


def _explain(use: RayUse) -> str:
    counterpart = find_counterpart(use.ray_name)
    if isinstance(counterpart, NoCounterpart):
        return counterpart.do
    return (
        f"`{use.source_name[0]}` may not refer to Ray here; if it does, change this line to "
        f"{counterpart.dotted}."
    )


def _is_cluster_call(use: RayUse) -> bool:
    return use.ray_name in CLUSTER_LIFECYCLE


def _drop_cluster_calls(scan: UsageScan, plan: MigrationPlan) -> None:
    """Delete calls such as `ray.init()` if the script does not need Ray for anything else."""
    needs_ray = (
        any(not _is_cluster_call(use) for use in plan.ray_uses)
        or any(_is_unused_import(binding, scan) for binding in scan.bindings)
        or any(
            isinstance(find_counterpart(path), NoCounterpart) for _, path, _ in scan.star_imports
        )
    )
    if needs_ray:
        return
    # A call whose result is used cannot be deleted; then all calls remain.
    statements = {use: _enclosing_statement(use, scan) for use in plan.ray_uses}
    if not all(statements.values()):
        return
    is_carried = _carry_runtime_env(scan, plan)
    for use, statement in statements.items():
        if statement is not None:
            plan.deletions.add(statement)
        plan.notes.append(_deletion_note(use, scan, is_carried=is_carried))
    plan.ray_uses.clear()


def _is_unused_import(binding: ImportBinding, scan: UsageScan) -> bool:
    """Return whether the script imports a Ray name without an equivalent and does not use it."""
    has_no_counterpart = binding.imported_name != RAY_ROOT and isinstance(
        find_counterpart(binding.imported_name), NoCounterpart
    )
    return has_no_counterpart and not _is_used(binding, scan.uses)


def _is_used(binding: ImportBinding, uses: Iterable[RayUse]) -> bool:
    own = [use for use in uses if binding in use.bindings]
    if binding.bound_name == binding.imported_name:
        return bool(own)
    # `import ray.data` binds `ray`, but only uses of `ray.data` need this import.
    return any(use.ray_name[: len(binding.imported_name)] == binding.imported_name for use in own)


def _enclosing_statement(use: RayUse, scan: UsageScan) -> cst.CSTNode | None:
    """Return the statement that only consists of this call, or None.

    An `if not ray.is_initialized():` whose body only calls the cluster counts as one statement.
    """
    call = scan.parents.get(use.node)
    above = scan.parents.get(call) if isinstance(call, cst.Call) else None
    if isinstance(above, cst.Expr):
        return above
    # The call is the condition of an `if`, with or without `not`.
    if isinstance(above, cst.UnaryOperation):
        above = scan.parents.get(above)
    return above if isinstance(above, cst.If) and _only_calls_cluster(above, scan) else None


def _only_calls_cluster(node: cst.If, scan: UsageScan) -> bool:
    calls = {scan.parents.get(use.node) for use in scan.uses if _is_cluster_call(use)}
    statements = [
        small
        for line in node.body.body
        for small in (line.body if isinstance(line, cst.SimpleStatementLine) else [line])
    ]
    return node.orelse is None and all(
        isinstance(each, cst.Expr) and each.value in calls for each in statements
    )


def _deletion_note(use: RayUse, scan: UsageScan, *, is_carried: bool) -> MigrationNote:
    call = scan.parents.get(use.node)
    what = f"{'.'.join(use.ray_name)}()"
    has_environment = isinstance(call, cst.Call) and "runtime_env" in _keywords(call)
    if has_environment and is_carried:
        do = "Removed; its runtime_env is now RunConfig(worker_runtime_env=...)."
        return MigrationNote(use.line, what, do, is_manual=False)
    if has_environment:
        do = "Removed; pass its runtime_env as RunConfig(worker_runtime_env=...)."
        return MigrationNote(use.line, what, do)
    do = "Removed: spotfit has no cluster to start or stop."
    return MigrationNote(use.line, what, do, is_manual=False)


def _carry_runtime_env(scan: UsageScan, plan: MigrationPlan) -> bool:
    """Pass the runtime_env of the script's `ray.init()` to its RunConfig, if that is unambiguous.

    Returns whether it did: the script has one literal runtime_env with keys that spotfit supports,
    and one RunConfig without an environment.
    """
    inits = [
        call for use in plan.ray_uses if isinstance(call := scan.parents.get(use.node), cst.Call)
    ]
    environments = [
        argument.value
        for call in inits
        for argument in call.args
        if argument.keyword and argument.keyword.value == "runtime_env"
    ]
    configs = [call for call, name, _ in _spotfit_calls(scan) if name == "RunConfig"]
    if len(environments) != 1 or len(configs) != 1:
        return False
    (environment,), (config,) = environments, configs
    has_own = "worker_runtime_env" in _keywords(config) or any(one.star for one in config.args)
    if has_own or not (isinstance(environment, cst.Dict) and _is_portable(environment)):
        return False
    plan.new_arguments[config] = ("worker_runtime_env", environment)
    return True


def _is_portable(environment: cst.Dict) -> bool:
    """Whether a dictionary consists of literals and is accepted by `worker_runtime_env`."""
    try:
        literal = ast.literal_eval(cst.Module([]).code_for_node(environment))
    except (ValueError, SyntaxError):
        return False
    # Ray also accepts a dictionary of options of pip.
    return literal.keys() <= _ENVIRONMENT_KEYS and not isinstance(literal.get("pip"), dict)


def _keywords(call: cst.Call) -> list[str]:
    return [argument.keyword.value for argument in call.args if argument.keyword]


def _unused_import_notes(scan: UsageScan) -> Iterator[MigrationNote]:
    """Yield a note for each unused import and each star import without an equivalent."""
    imports = [
        (binding.line, binding.imported_name, ".".join(binding.imported_name))
        for binding in scan.bindings
        if _is_unused_import(binding, scan)
    ]
    imports += [
        (line, path, f"from {'.'.join(path)} import *") for _, path, line in scan.star_imports
    ]
    for line, path, what in imports:
        counterpart = find_counterpart(path)
        if isinstance(counterpart, NoCounterpart):
            yield MigrationNote(line, what, counterpart.do)


def _argument_notes(scan: UsageScan) -> Iterator[MigrationNote]:
    """Yield a note for each argument that spotfit rejects, and each call that means more."""
    for call, name, line in _spotfit_calls(scan):
        passed = _keywords(call)
        if name in CHANGED_CALLS:
            yield MigrationNote(line, name, CHANGED_CALLS[name])
        for argument, do in REMOVED_ARGUMENTS.get(name, {}).items():
            if argument in passed:
                yield MigrationNote(line, f"{name}({argument}=...)", f"No longer supported: {do}.")
        for argument in passed if name.endswith("Trainer") else ():
            if argument in UNSUPPORTED_ARGUMENTS:
                do = UNSUPPORTED_ARGUMENTS[argument]
                yield MigrationNote(line, f"{name}({argument}=...)", do)


def _spotfit_calls(scan: UsageScan) -> Iterator[tuple[cst.Call, str, int]]:
    """Yield the calls of names with an equivalent, with the equivalent's name and the line."""
    for use in scan.uses:
        call, counterpart = scan.parents.get(use.node), find_counterpart(use.ray_name)
        if not isinstance(counterpart, SpotfitName):
            continue
        if isinstance(call, cst.Call) and call.func is use.node:
            yield call, counterpart.name, use.line


def _plan_string(node: cst.SimpleString, value: str, *, line: int, plan: MigrationPlan) -> None:
    # A string that consists of the name is replaced; within other text the user must decide.
    variable = find_variable(value)
    if variable is not None:
        plan.replacements[node] = node.value.replace(value, variable)
        return
    for name in _RAY_VARIABLE_PATTERN.findall(value):
        variable = find_variable(name)
        do = f"Use {variable}." if variable else f"No effect: {explain_ignored_variable(name)}."
        # A variable without effect may stay.
        plan.notes.append(MigrationNote(line, name, do, is_manual=variable is not None))
    # Not replaced: it may be a module for importlib or mock.patch, or merely a text.
    if _RAY_MODULE_PATTERN.fullmatch(value):
        counterpart = find_counterpart(tuple(value.split(".")))
        if isinstance(counterpart, SpotfitName):
            do = f"The equivalent is {counterpart.dotted}."
        else:
            do = counterpart.do
        what = f"This string may be a module name. {do}"
        plan.notes.append(MigrationNote(line, repr(value), what))
