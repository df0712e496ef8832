"""Measure the size, naming and structure of the code: `make measure [PATHS=sdk/spotfit/agent]`.

Tests are excluded. A "body" is the number of lines of a function that hold a token, without its
signature and docstring. A private function counts as "used once" if its module defines it once and
its name occurs there exactly once more.
"""

from __future__ import annotations

import ast
import collections
import io
import statistics
import sys
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_PATHS = ("sdk/spotfit", "provisioners", "localsim")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Measure:
    """What was counted in a set of files."""

    file_lines: list[int] = field(default_factory=list)
    code_lines: int = 0
    statements: int = 0
    docstring_lines: int = 0
    comment_lines: int = 0
    body_lines: list[int] = field(default_factory=list)
    long_bodies: list[str] = field(default_factory=list)
    many_arguments: list[str] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))
    modules: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))
    private_used_once: list[str] = field(default_factory=list)


def main(paths: Sequence[str]) -> None:
    roots = [ROOT / path for path in paths or DEFAULT_PATHS]
    for root in roots:
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        measure = Measure()
        for path in files:
            _add_file(measure, path)
        _print_measure(root.relative_to(ROOT).as_posix(), measure, verbose=bool(paths))


def _add_file(measure: Measure, path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    where = path.relative_to(ROOT).as_posix()
    docstrings = _docstring_lines(tree)
    code, comments = _token_lines(text)
    measure.file_lines.append(text.count("\n"))
    measure.code_lines += len(code - docstrings)
    measure.statements += _count_statements(tree)
    measure.docstring_lines += len(docstrings)
    measure.comment_lines += comments
    measure.modules[path.stem].append(where)
    measure.private_used_once += _private_used_once(tree, where)
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                measure.classes[name].append(where)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                _add_function(measure, node, where, code - docstrings)


def _add_function(measure: Measure, node: _Function, where: str, code: set[int]) -> None:
    start = node.body[0].lineno
    body = len([line for line in code if start <= line <= (node.end_lineno or start)])
    measure.body_lines.append(body)
    label = f"{where}:{node.lineno} {node.name} ({body})"
    if body > 40:
        measure.long_bodies.append(label)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = len([one for one in arguments if one.arg not in ("self", "cls")])
    if count > 7:
        measure.many_arguments.append(f"{where}:{node.lineno} {node.name} ({count})")


def _count_statements(tree: ast.Module) -> int:
    """Statements, branches of `match` and `except` clauses; does not depend on line wrapping."""
    kinds = ast.stmt | ast.ExceptHandler | ast.match_case
    return sum(
        isinstance(node, kinds)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(tree)
    )


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of every string that is a statement: docstrings, also those of attributes."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _token_lines(text: str) -> tuple[set[int], int]:
    """The lines that hold code, and the number of comments that say something.

    Directives (`noqa`, `type: ignore`) count only with the reason that follows them.
    """
    code: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            directive = words.startswith(("noqa", "type:", "pragma"))
            comments += not directive or " - " in words or "  # " in token.string
        elif token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code, comments


def _private_used_once(tree: ast.Module, where: str) -> list[str]:
    uses: collections.Counter[str] = collections.Counter()
    definitions = collections.defaultdict(list)
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                uses[name] += 1
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name.startswith("_") and not name.startswith("__"):
                    lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
                    definitions[name].append(f"{where}:{node.lineno} {name} ({lines})")
    return [
        places[0] for name, places in definitions.items() if len(places) == 1 and uses[name] == 1
    ]


def _percentile(values: Sequence[int], fraction: float) -> int:
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))] if values else 0


def _print_measure(name: str, measure: Measure, *, verbose: bool) -> None:
    once = measure.private_used_once
    functions = max(1, len(measure.body_lines))
    duplicates = {n: where for n, where in measure.classes.items() if len(where) > 1}
    print(f"{name}")
    print(f"  files                         {len(measure.file_lines)}")
    print(f"  physical lines                {sum(measure.file_lines)}")
    print(f"  code lines                    {measure.code_lines}")
    print(f"  statements                    {measure.statements}")
    print(f"  comment lines / code lines    {measure.comment_lines / measure.code_lines:.3f}")
    print(f"  docstring lines / code lines  {measure.docstring_lines / measure.code_lines:.2f}")
    print(f"  median module, lines          {statistics.median(measure.file_lines):.0f}")
    print(f"  functions                     {len(measure.body_lines)}")
    body = [_percentile(measure.body_lines, one) for one in (0.5, 0.9, 0.99)]
    print(f"  body lines, median/p90/p99    {'/'.join(map(str, body))}")
    print(f"  bodies over 40 lines          {len(measure.long_bodies)}")
    print(f"  more than 7 arguments         {len(measure.many_arguments)}")
    print(f"  private, used once            {len(once)} ({len(once) / functions:.1%})")
    print(f"  class names used twice        {len(duplicates)}")
    if verbose:
        for title, rows in (
            ("bodies over 40 lines", measure.long_bodies),
            ("more than 7 arguments", measure.many_arguments),
            ("class names used twice", [f"{n}: {', '.join(w)}" for n, w in duplicates.items()]),
            ("private, used once", once),
        ):
            print(f"  {title}:", *rows, sep="\n    ")


if __name__ == "__main__":
    main(sys.argv[1:])
