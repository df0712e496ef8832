"""`Editor` applies a migration plan to the syntax tree. Formatting and comments are preserved.

Migration of one script: parse, scan, plan, edit.

Replacement of import statements: `rewrite_imports` translates `ray.train` imports to spotfit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper

from spotfit.core.errors import ConfigError
from spotfit.migrate.migration_plan import (
    MigrationNote,
    MigrationPlan,
    counterpart_of,
    is_still_needed,
    make_plan,
    unsupported_trainers,
)
from spotfit.migrate.name_map import MIGRATED_PACKAGES, SpotfitName, find_counterpart
from spotfit.migrate.usage_scan import SPOTFIT, ImportBinding, UsageScan, dotted_name, scan_usage

# --- Replacement of import statements -------------------------------------------------------------


def rewrite_imports(
    scan: UsageScan, plan: MigrationPlan
) -> dict[cst.CSTNode, list[SmallStatement]]:
    """Return the replacement statements of each import statement of Ray in the script.

    An empty list means that the statement is deleted. Statements of Ray that must remain replace
    themselves. The syntax tree is not changed; `Editor` applies the result.
    """
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
    for package in MIGRATED_PACKAGES:
        bindings = {binding for binding in own if binding.bound_name == (package,)}
        if any(bindings & set(use.bindings) for use in plan.ray_uses):
            names.append((package, package))
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


SmallStatement = cst.BaseSmallStatement
LeadingLines = Sequence[cst.EmptyLine]
_SPACE = cst.SimpleWhitespace(" ")


class Editor(cst.CSTTransformer):
    """Replaces and deletes the nodes of a plan, and replaces import statements, in one syntax tree.

    libcst calls `leave_<node type>` after it has visited a node; the result takes its place.
    """

    def __init__(
        self, plan: MigrationPlan, imports: Mapping[cst.CSTNode, list[SmallStatement]]
    ) -> None:
        super().__init__()
        self._replacements = plan.replacements
        self._deletions = plan.deletions
        self._new_arguments = plan.new_arguments
        self._imports = imports

    def leave_Attribute(self, original_node: Any, updated_node: Any) -> cst.BaseExpression:
        """Return the planned replacement of an expression, in its parentheses, else the node."""
        # Plans refer to the nodes of the original tree; the updated node has edited children.
        if original_node not in self._replacements:
            return updated_node  # type: ignore[no-any-return]  # one of three node types
        # Without its parentheses, an expression that spans lines would not be valid any more.
        replacement = cst.parse_expression(self._replacements[original_node])
        return replacement.with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)

    # libcst calls a method per node type. These are the types of which plans replace nodes.
    leave_Name = leave_Attribute  # noqa: N815  # the name of a libcst node
    leave_SimpleString = leave_Attribute  # noqa: N815

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Return the call with the planned keyword argument appended."""
        if original_node not in self._new_arguments:
            return updated_node
        name, value = self._new_arguments[original_node]
        added = cst.Arg(
            keyword=cst.Name(name),
            # The value is within a deleted statement, where it may contain replaced names.
            value=cst.ensure_type(value.visit(self), cst.Dict),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        )
        if not updated_node.args:
            return updated_node.with_changes(args=[added])
        *others, last = updated_node.args
        between = others[-1].comma if others else cst.Comma(whitespace_after=_SPACE)
        arguments = [
            *others,
            last.with_changes(comma=between),
            added.with_changes(comma=last.comma),
        ]
        return updated_node.with_changes(args=arguments)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Return the module with replaced imports and without deleted statements."""
        body, comments = self._edit_body(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body, footer=[*comments, *updated_node.footer])

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Return the block with replaced imports and without deleted statements.

        A block that becomes empty contains `pass`.
        """
        body, comments = self._edit_body(original_node.body, updated_node.body)
        if not body:  # a block must contain a statement
            body = [cst.SimpleStatementLine(body=[cst.Pass()], leading_lines=comments)]
            comments = []
        return updated_node.with_changes(body=body, footer=[*comments, *updated_node.footer])

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        """Return the one-line block without deleted statements; `pass` if none is left."""
        # `if x: ray.init()` on one line needs a statement after the colon.
        smalls = self._edit_small_statements(original_node.body, updated_node.body)
        return updated_node.with_changes(body=smalls or [cst.Pass()])

    def _edit_body(
        self, old: Sequence[cst.BaseStatement], new: Sequence[cst.BaseStatement]
    ) -> tuple[list[cst.BaseStatement], LeadingLines]:
        """Return the remaining statements, and the comments of deleted statements at the end.

        Comments above another deleted statement move to the next remaining statement.
        """
        body: list[cst.BaseStatement] = []
        orphaned_lines: LeadingLines = ()
        for before, after in zip(old, new, strict=True):
            edited = self._edit_statement(before, after)
            # The comments of a deleted statement may concern the code below it.
            if not edited:
                orphaned_lines = _merge_leading_lines(orphaned_lines, _leading_lines(before))
                continue
            lines = _merge_leading_lines(orphaned_lines, _leading_lines(edited[0]))
            body += [edited[0].with_changes(leading_lines=lines), *edited[1:]]
            orphaned_lines = ()
        return body, [line for line in orphaned_lines if line.comment]

    def _edit_statement(
        self, before: cst.BaseStatement, after: cst.BaseStatement
    ) -> list[cst.BaseStatement]:
        if before in self._deletions:
            return []
        if not isinstance(before, cst.SimpleStatementLine):
            return [after]
        line = cst.ensure_type(after, cst.SimpleStatementLine)
        smalls = self._edit_small_statements(before.body, line.body)
        if len(before.body) > 1:  # several statements separated by semicolons stay on one line
            return [line.with_changes(body=smalls)] if smalls else []
        # One import may become several: the last one keeps the trailing comment, the first one the
        # comments above.
        added = [cst.SimpleStatementLine(body=[small]) for small in smalls[:-1]]
        lines = [*added, *(line.with_changes(body=[small]) for small in smalls[-1:])]
        if added:
            lines[0] = lines[0].with_changes(leading_lines=line.leading_lines)
            lines[-1] = lines[-1].with_changes(leading_lines=())
        return list(lines)

    def _edit_small_statements(
        self, old: Sequence[SmallStatement], new: Sequence[SmallStatement]
    ) -> list[SmallStatement]:
        edited: list[SmallStatement] = []
        for before, after in zip(old, new, strict=True):
            if before in self._imports:
                edited += self._imports[before]
            elif before not in self._deletions:
                edited.append(after)
        return edited


def _leading_lines(statement: cst.BaseStatement) -> LeadingLines:
    lines: LeadingLines = getattr(statement, "leading_lines", ())
    return lines


def _merge_leading_lines(above: LeadingLines, below: LeadingLines) -> LeadingLines:
    """Return all comments of both, or without comments the longer run of blank lines."""
    if any(line.comment for line in (*above, *below)):
        return [*above, *below]
    return max(above, below, key=len)


# --- Migration of one script ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewrittenScript:
    """The new text of a script, and notes about removed code and manual changes, by line."""

    text: bytes
    notes: tuple[MigrationNote, ...]

    @property
    def manual_notes(self) -> tuple[MigrationNote, ...]:
        """Notes that require a manual change, by line."""
        return tuple(note for note in self.notes if note.is_manual)


def rewrite_script(source: bytes, *, name: str = "<script>") -> RewrittenScript:
    """Return the migrated text of a script with notes. The script is not executed or written.

    `source` is the file's content and `name` names it in errors. A script that does not use Ray, or
    uses a trainer without an equivalent, is returned unchanged. Raises `ConfigError` if the source
    is not valid Python.
    """
    try:
        module = cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError(
            f"{name} is not valid Python: {error}",
            do="Correct the syntax error, then migrate the script again.",
        ) from error
    # The module is used nowhere else, so the default deep copy of the tree is unnecessary.
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    scan = scan_usage(wrapper)
    if notes := unsupported_trainers(scan):
        return RewrittenScript(source, tuple(notes))
    plan = make_plan(scan)
    edited = wrapper.module.visit(Editor(plan, rewrite_imports(scan, plan)))
    return RewrittenScript(edited.bytes, tuple(plan.notes))
