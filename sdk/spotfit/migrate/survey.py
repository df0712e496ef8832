"""What a script says of Ray: which names it binds, where it uses them, and what is only text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst import metadata as facts

from spotfit.migrate.places import ROOT, Path

OURS = "spotfit"
_IN_TEXT = re.compile(r"\bray(?:\.\w+)+")


@dataclass(frozen=True, eq=False, slots=True)
class Binding:
    """One name of an import statement, and what it stands for afterwards.

    `import ray.train` binds `ray` to `ray`, `import ray.train as t` binds `t` to `ray.train`.
    """

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    local: str
    path: Path
    imported: Path
    scope: facts.Scope | None
    line: int


@dataclass(frozen=True, eq=False, slots=True)
class Use:
    """A chain of names as it is written, and what its first name may be bound to.

    `sure` is false where that name may be something that is not of Ray. For an annotation in
    quotes, `within` is the text between them.
    """

    node: cst.BaseExpression
    written: Path
    bindings: Sequence[Binding]
    sure: bool
    line: int
    within: str = ""

    @property
    def path(self) -> Path:
        """What it means, in Ray's words."""
        return (*self.bindings[0].path, *self.written[1:])


@dataclass(slots=True)
class Survey:
    """Everything a script says of Ray, in the order of its lines."""

    bindings: list[Binding] = field(default_factory=list)
    stars: list[tuple[cst.ImportFrom, Path, int]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    texts: list[tuple[cst.SimpleString, str, int]] = field(default_factory=list)
    """Strings that are not documentation: their node, their value, their line."""
    our_name_is_taken: bool = False
    """Whether the script calls something else `spotfit`."""
    parents: Mapping[cst.CSTNode, cst.CSTNode] = field(default_factory=dict)


def survey(wrapper: facts.MetadataWrapper) -> Survey:
    """Read a parsed script."""
    found = Survey(parents=wrapper.resolve(facts.ParentNodeProvider))
    scopes = set(wrapper.resolve(facts.ScopeProvider).values())
    found.our_name_is_taken = any(_is_taken(scope) for scope in scopes if scope is not None)
    wrapper.visit(_Imports(found))
    wrapper.visit(_Uses(found))
    return found


def dotted(node: cst.BaseExpression | None) -> Path:
    """The parts of `a.b.c`; nothing for any other expression."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    return (node.value, *reversed(parts)) if isinstance(node, cst.Name) else ()


def head(node: cst.BaseExpression, length: int) -> cst.BaseExpression:
    """The part of a chain that holds its first `length` names."""
    for _ in range(len(dotted(node)) - length):
        node = cst.ensure_type(node, cst.Attribute).value
    return node


def _is_taken(scope: facts.Scope) -> bool:
    """Whether this scope itself calls something else by our name."""
    mine = (one for one in scope.assignments if one.name == OURS)
    nodes = (getattr(one, "node", None) for one in mine)
    return any(not isinstance(node, cst.Import) or not _imports_us(node) for node in nodes)


def _imports_us(node: cst.Import) -> bool:
    return any(dotted(alias.name)[:1] == (OURS,) for alias in node.names)


class _Imports(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (facts.ScopeProvider, facts.PositionProvider)

    def __init__(self, found: Survey) -> None:
        super().__init__()
        self._found = found

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            imported = dotted(alias.name)
            path = imported if alias.asname else imported[:1]
            self._note(node, alias, _local(alias) or imported[0], path, imported)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        if node.relative:
            return False
        module = dotted(node.module)
        if isinstance(node.names, cst.ImportStar):
            if module[:1] == ROOT:
                self._found.stars.append((node, module, self._line(node)))
            return False
        for alias in node.names:
            name = cst.ensure_type(alias.name, cst.Name).value
            path = (*module, name)
            self._note(node, alias, _local(alias) or name, path, path)
        return False

    def _note(
        self,
        node: cst.Import | cst.ImportFrom,
        alias: cst.ImportAlias,
        local: str,
        path: Path,
        imported: Path,
    ) -> None:
        if path[:1] != ROOT:
            return
        scope = self.get_metadata(facts.ScopeProvider, node, None)
        self._found.bindings.append(
            Binding(node, alias, local, path, imported, scope, self._line(node))
        )

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(facts.PositionProvider, node).start.line)


class _Uses(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (facts.ScopeProvider, facts.PositionProvider)

    def __init__(self, found: Survey) -> None:
        super().__init__()
        self._found = found
        self._quotes_are_code = False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self._quotes_are_code = True

    def leave_Annotation(self, original_node: cst.Annotation) -> None:
        self._quotes_are_code = False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if dotted(node):
            self._use(node, node)
            return False
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self._use(node, node)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        value = node.evaluated_value
        if not isinstance(value, str):
            return
        if self._quotes_are_code:
            self._quoted(node, value)
        elif not isinstance(self._found.parents.get(node), cst.Expr):
            self._found.texts.append((node, value, self._line(node)))

    def _quoted(self, node: cst.SimpleString, value: str) -> None:
        scope = self.get_metadata(facts.ScopeProvider, node, None)
        for chain in sorted(set(_IN_TEXT.findall(value))):
            path = tuple(chain.split("."))
            self._note(node, path, scope, within=chain)

    def _use(self, node: cst.BaseExpression, chain: cst.BaseExpression) -> None:
        first = cst.ensure_type(head(chain, 1), cst.Name)
        scope = self.get_metadata(facts.ScopeProvider, first, None)
        self._note(node, dotted(chain), scope)

    def _note(
        self, node: cst.BaseExpression, written: Path, scope: facts.Scope | None, within: str = ""
    ) -> None:
        if scope is None:  # the keyword of an argument, a part of an import
            return
        bound = list(scope[written[0]])
        bindings = [one for one in self._found.bindings if _binds(one, written[0], bound)]
        if not bindings:
            return
        sure = len({one.path for one in bindings}) == 1 and not any(
            self._is_a_stranger(one) for one in bound
        )
        self._found.uses.append(Use(node, written, bindings, sure, self._line(node), within))

    def _is_a_stranger(self, assignment: facts.BaseAssignment) -> bool:
        """Whether it binds the name to something else; None, where an import failed, is nothing."""
        node = getattr(assignment, "node", None)
        if isinstance(node, cst.Import | cst.ImportFrom):
            return not any(one.statement is node for one in self._found.bindings)
        target = self._found.parents.get(node) if node is not None else None
        assigned = self._found.parents.get(target) if target is not None else None
        nothing = isinstance(assigned, cst.Assign) and dotted(assigned.value) == ("None",)
        return not nothing

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(facts.PositionProvider, node).start.line)


def _binds(binding: Binding, name: str, bound: Sequence[facts.BaseAssignment]) -> bool:
    return binding.local == name and any(
        getattr(one, "node", None) is binding.statement for one in bound
    )


def _local(alias: cst.ImportAlias) -> str | None:
    return cst.ensure_type(alias.asname.name, cst.Name).value if alias.asname else None
