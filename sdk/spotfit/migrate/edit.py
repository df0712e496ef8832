"""Carrying a plan out: the text changes where the plan says so, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst

from spotfit.migrate.plan import Plan

Small = cst.BaseSmallStatement
Lines = Sequence[cst.EmptyLine]


class Editor(cst.CSTTransformer):
    """Puts new expressions and statements in the place of old ones, comments kept."""

    def __init__(self, plan: Plan, imports: Mapping[cst.CSTNode, list[Small]]) -> None:
        super().__init__()
        self._swaps = plan.swaps
        self._drops = plan.drops
        self._imports = imports

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        return self._swapped(original_node, updated_node)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return self._swapped(original_node, updated_node)

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.BaseExpression:
        return self._swapped(original_node, updated_node)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        body, left = self._body(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body, footer=[*left, *updated_node.footer])

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body, left = self._body(original_node.body, updated_node.body)
        if not body:
            body, left = [_passing(left)], []
        return updated_node.with_changes(body=body, footer=[*left, *updated_node.footer])

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        smalls = self._smalls(original_node.body, updated_node.body)
        return updated_node.with_changes(body=smalls or [cst.Pass()])

    def _swapped(self, old: Any, new: Any) -> cst.BaseExpression:
        if old not in self._swaps:
            return new  # type: ignore[no-any-return]  # what libcst gave
        made = cst.parse_expression(self._swaps[old])
        return made.with_changes(lpar=new.lpar, rpar=new.rpar)

    def _body(
        self, old: Sequence[cst.BaseStatement], new: Sequence[cst.BaseStatement]
    ) -> tuple[list[cst.BaseStatement], Lines]:
        """The statements that stay, and the comments that lost theirs at the end."""
        body: list[cst.BaseStatement] = []
        orphans: Lines = ()
        for before, after in zip(old, new, strict=True):
            made = self._statements(before, after)
            if not made:
                orphans = _joined(orphans, _leading(before))
                continue
            lines = _joined(orphans, _leading(made[0]))
            body += [made[0].with_changes(leading_lines=lines), *made[1:]]
            orphans = ()
        return body, [line for line in orphans if line.comment]

    def _statements(
        self, before: cst.BaseStatement, after: cst.BaseStatement
    ) -> list[cst.BaseStatement]:
        if before in self._drops:
            return []
        if not isinstance(before, cst.SimpleStatementLine):
            return [after]
        line = cst.ensure_type(after, cst.SimpleStatementLine)
        smalls = self._smalls(before.body, line.body)
        if len(before.body) > 1:
            return [line.with_changes(body=smalls)] if smalls else []
        alone = [cst.SimpleStatementLine(body=[small]) for small in smalls[:-1]]
        made = [*alone, *(line.with_changes(body=[small]) for small in smalls[-1:])]
        if alone:
            made[0] = made[0].with_changes(leading_lines=line.leading_lines)
            made[-1] = made[-1].with_changes(leading_lines=())
        return list(made)

    def _smalls(self, old: Sequence[Small], new: Sequence[Small]) -> list[Small]:
        made: list[Small] = []
        for before, after in zip(old, new, strict=True):
            if before in self._imports:
                made += self._imports[before]
            elif before not in self._drops:
                made.append(after)
        return made


def _leading(statement: cst.BaseStatement) -> Lines:
    lines: Lines = getattr(statement, "leading_lines", ())
    return lines


def _joined(above: Lines, below: Lines) -> Lines:
    """Comments all stay; of blank lines, the more of the two."""
    if any(line.comment for line in (*above, *below)):
        return [*above, *below]
    return max(above, below, key=len)


def _passing(comments: Lines) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine(body=[cst.Pass()], leading_lines=comments)
