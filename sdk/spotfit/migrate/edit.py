"""`Editor` applies a migration plan to the syntax tree. Formatting and comments are preserved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst

from spotfit.migrate.migration_plan import MigrationPlan

SmallStatement = cst.BaseSmallStatement
LeadingLines = Sequence[cst.EmptyLine]


class Editor(cst.CSTTransformer):
    """Replaces and deletes the nodes of a plan, and replaces import statements."""

    def __init__(
        self, plan: MigrationPlan, imports: Mapping[cst.CSTNode, list[SmallStatement]]
    ) -> None:
        super().__init__()
        self._replacements = plan.replacements
        self._deletions = plan.deletions
        self._imports = imports

    def leave_Attribute(self, original_node: Any, updated_node: Any) -> cst.BaseExpression:
        # Plans refer to the nodes of the original tree; the updated node has edited children.
        if original_node not in self._replacements:
            return updated_node  # type: ignore[no-any-return]  # one of three node types
        # Without its parentheses, an expression that spans lines would not be valid any more.
        replacement = cst.parse_expression(self._replacements[original_node])
        return replacement.with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)

    # libcst calls a method per node type. These are the types of which plans replace nodes.
    leave_Name = leave_Attribute  # noqa: N815  # the name of a libcst node
    leave_SimpleString = leave_Attribute  # noqa: N815

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        body, comments = self._edit_body(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body, footer=[*comments, *updated_node.footer])

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body, comments = self._edit_body(original_node.body, updated_node.body)
        if not body:  # a block must contain a statement
            body = [cst.SimpleStatementLine(body=[cst.Pass()], leading_lines=comments)]
            comments = []
        return updated_node.with_changes(body=body, footer=[*comments, *updated_node.footer])

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
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
