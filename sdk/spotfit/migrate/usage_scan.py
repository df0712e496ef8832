"""Analysis of a script: imports of Ray, uses of the imported names, and strings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst import metadata

from spotfit.migrate.name_map import MIGRATED_PACKAGES, DottedName

SPOTFIT = "spotfit"
_RAY_NAME_PATTERN = re.compile(r"\bray(?:\.\w+)+")


@dataclass(frozen=True, eq=False, slots=True)
class ImportBinding:
    """One alias of an import statement of a script.

    `import ray.train` imports `ray.train` and binds the local name `ray` to `ray`; `import
    ray.train as t` binds `t` to `ray.train`.
    """

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    local_name: str
    bound_name: DottedName
    imported_name: DottedName
    scope: metadata.Scope | None
    line: int


@dataclass(frozen=True, eq=False, slots=True)
class RayUse:
    """An attribute chain in the source, and the imports to which its first name may be bound.

    `is_certain` is False if the first name may also be bound to something other than Ray.
    `annotation_text` is the chain as written within a quoted annotation, else ''.
    """

    node: cst.BaseExpression
    source_name: DottedName
    bindings: Sequence[ImportBinding]
    is_certain: bool
    line: int
    annotation_text: str = ""

    @property
    def ray_name(self) -> DottedName:
        """The full name in Ray, such as ("ray", "train", "report") for `train.report`."""
        return (*self.bindings[0].bound_name, *self.source_name[1:])


@dataclass(slots=True)
class UsageScan:
    """All imports and uses of Ray in a script, in source order."""

    bindings: list[ImportBinding] = field(default_factory=list)
    star_imports: list[tuple[cst.ImportFrom, DottedName, int]] = field(default_factory=list)
    uses: list[RayUse] = field(default_factory=list)
    strings: list[tuple[cst.SimpleString, str, int]] = field(default_factory=list)
    """Strings other than docstrings: node, value, line."""
    is_spotfit_taken: bool = False
    """Whether the script binds the name `spotfit` to something else."""
    parents: Mapping[cst.CSTNode, cst.CSTNode] = field(default_factory=dict)


def scan_usage(wrapper: metadata.MetadataWrapper) -> UsageScan:
    """Collect all imports and uses of Ray in one parsed script, and its strings.

    Imports are collected first: a function may use a name that is imported further below. The
    script is not changed or executed.
    """
    scan = UsageScan(parents=wrapper.resolve(metadata.ParentNodeProvider))
    # Imports of spotfit, which a migrated script has, are the only bindings that do not count.
    scopes = set(wrapper.resolve(metadata.ScopeProvider).values())
    assignments = [each for scope in scopes if scope is not None for each in scope.assignments]
    nodes = [getattr(each, "node", None) for each in assignments if each.name == SPOTFIT]
    scan.is_spotfit_taken = not all(
        isinstance(node, cst.Import)
        and any(dotted_name(alias.name)[:1] == (SPOTFIT,) for alias in node.names)
        for node in nodes
    )
    # Two passes: a function may use a name that is imported further below.
    wrapper.visit(_ImportCollector(scan))
    wrapper.visit(_UseCollector(scan))
    return scan


def dotted_name(node: cst.BaseExpression | None) -> DottedName:
    """Return the parts of the expression `a.b.c`: ("a", "b", "c"); () for any other expression."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    return (node.value, *reversed(parts)) if isinstance(node, cst.Name) else ()


def chain_head(node: cst.BaseExpression, length: int) -> cst.BaseExpression:
    """Return the subexpression of a chain that contains its first `length` names.

    Of `a.b.c` with length 2 it is the node of `a.b`.
    """
    for _ in range(len(dotted_name(node)) - length):
        node = cst.ensure_type(node, cst.Attribute).value
    return node


class _Collector(cst.CSTVisitor):
    """A pass over the syntax tree that adds to a scan."""

    METADATA_DEPENDENCIES = (metadata.ScopeProvider, metadata.PositionProvider)

    def __init__(self, scan: UsageScan) -> None:
        super().__init__()
        self._scan = scan

    def _line_of(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(metadata.PositionProvider, node).start.line)


class _ImportCollector(_Collector):
    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            imported = dotted_name(alias.name)
            path = imported if alias.asname else imported[:1]
            self._add_binding(
                node, alias, local=_alias_name(alias) or imported[0], path=path, imported=imported
            )
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        if node.relative:  # `from .ray import x` is a module of the user
            return False
        module = dotted_name(node.module)
        if isinstance(node.names, cst.ImportStar):
            if module[0] in MIGRATED_PACKAGES:
                self._scan.star_imports.append((node, module, self._line_of(node)))
            return False
        for alias in node.names:
            name = cst.ensure_type(alias.name, cst.Name).value
            path = (*module, name)
            self._add_binding(
                node, alias, local=_alias_name(alias) or name, path=path, imported=path
            )
        return False

    def _add_binding(
        self,
        node: cst.Import | cst.ImportFrom,
        alias: cst.ImportAlias,
        *,
        local: str,
        path: DottedName,
        imported: DottedName,
    ) -> None:
        if path[0] not in MIGRATED_PACKAGES:
            return
        self._scan.bindings.append(
            ImportBinding(
                statement=node,
                alias=alias,
                local_name=local,
                bound_name=path,
                imported_name=imported,
                scope=self.get_metadata(metadata.ScopeProvider, node, None),
                line=self._line_of(node),
            )
        )


class _UseCollector(_Collector):
    _quotes_are_code = False
    """Whether the node is within an annotation, where strings contain expressions."""

    # The names within import statements are bindings, which the first pass has collected.
    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self._quotes_are_code = True

    def leave_Annotation(self, original_node: cst.Annotation) -> None:
        self._quotes_are_code = False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        # The whole chain is one use: its parts must not be visited again as shorter chains.
        if dotted_name(node):
            self._add_chain(node)
            return False
        node.value.visit(self)  # `f(ray.x).y`: not a chain, but it may contain one
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self._add_chain(node)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        value = node.evaluated_value
        if not isinstance(value, str):
            return
        if self._quotes_are_code:
            # libcst does not parse quoted annotations, so the chains are found by a pattern.
            scope = self.get_metadata(metadata.ScopeProvider, node, None)
            for chain in sorted(set(_RAY_NAME_PATTERN.findall(value))):
                self._add_use(node, tuple(chain.split(".")), scope=scope, annotation_text=chain)
        elif not isinstance(self._scan.parents.get(node), cst.Expr):  # a docstring
            self._scan.strings.append((node, value, self._line_of(node)))

    def _add_chain(self, chain: cst.Attribute | cst.Name) -> None:
        # Scopes are recorded for names only.
        first = cst.ensure_type(chain_head(chain, 1), cst.Name)
        scope = self.get_metadata(metadata.ScopeProvider, first, None)
        self._add_use(chain, dotted_name(chain), scope=scope)

    def _add_use(
        self,
        node: cst.BaseExpression,
        source_name: DottedName,
        *,
        scope: metadata.Scope | None,
        annotation_text: str = "",
    ) -> None:
        if scope is None:  # keyword names of arguments and parts of imports have no scope
            return
        # Those of the innermost scope that binds the name, as in Python's name resolution.
        assignments = list(scope[source_name[0]])
        statements = [getattr(each, "node", None) for each in assignments]
        bindings = [
            each
            for each in self._scan.bindings
            if each.local_name == source_name[0]
            and any(node is each.statement for node in statements)
        ]
        if not bindings:
            return
        is_certain = len({each.bound_name for each in bindings}) == 1 and not any(
            self._is_unrelated(each) for each in assignments
        )
        self._scan.uses.append(
            RayUse(
                node=node,
                source_name=source_name,
                bindings=bindings,
                is_certain=is_certain,
                line=self._line_of(node),
                annotation_text=annotation_text,
            )
        )

    def _is_unrelated(self, assignment: metadata.BaseAssignment) -> bool:
        """Return whether the assignment binds the name to something other than Ray or None.

        None does not count: scripts assign it if the import of Ray fails.
        """
        node = getattr(assignment, "node", None)
        if isinstance(node, cst.Import | cst.ImportFrom):
            return not any(each.statement is node for each in self._scan.bindings)
        target = self._scan.parents.get(node) if node is not None else None
        statement = self._scan.parents.get(target) if target is not None else None
        return not (isinstance(statement, cst.Assign) and dotted_name(statement.value) == ("None",))


def _alias_name(alias: cst.ImportAlias) -> str | None:
    return cst.ensure_type(alias.asname.name, cst.Name).value if alias.asname else None
