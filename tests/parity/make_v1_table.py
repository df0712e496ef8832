"""Print the table of names that Ray removed, from the wheel of the last version with all of them.

    .venv/bin/python -m tests.parity.make_v1_table ray-2.6.3-….whl > tests/parity/ray_train_2_6.json

`make parity` does so, and compares the output with the stored table. The wheel is parsed, not
imported: it needs packages that conflict with those of today.
"""

from __future__ import annotations

import ast
import json
import posixpath
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.parity.describe import Description, is_public
from tests.parity.scope import V1_MODULES

TABLE_2_60 = Path(__file__).with_name("ray_train_2_60.json")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def main(arguments: list[str]) -> None:
    still_there = {name for names in json.loads(TABLE_2_60.read_text()).values() for name in names}
    wheel = Wheel(Path(arguments[0]))
    print("{")
    print(",\n".join(_lines(wheel, module, still_there) for module in V1_MODULES))
    print("}")


def _lines(wheel: Wheel, module: str, still_there: set[str]) -> str:
    names = V1_MODULES[module] or wheel.exported(module)
    removed = sorted(name for name in names if name not in still_there)
    lines = (f" {json.dumps(name)}: {json.dumps(wheel.describe(module, name))}" for name in removed)
    return f"{json.dumps(module)}: {{\n" + ",\n".join(lines) + "\n}"


class Wheel:
    """Modules of a wheel as syntax trees, and what their names are."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._files = set(self._archive.namelist())
        self._trees: dict[str, ast.Module] = {}

    def exported(self, module: str) -> list[str]:
        """Return `__all__`, or the public functions of a module without it."""
        body = self._tree(module).body
        for node in body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        return [
            node.name for node in body if isinstance(node, FunctionNode) and is_public(node.name)
        ]

    def describe(self, module: str, name: str) -> Description:
        """Describe a name in the format of tests/parity/describe.py, without its values."""
        home, node = self._definition(module, name)
        if isinstance(node, FunctionNode):
            return {"kind": "function", "parameters": _parameters(node)}
        if not isinstance(node, ast.ClassDef):
            return {"kind": "constant", "value": ast.unparse(node)}
        functions = self._functions(home, node)
        constructor = functions.pop("__init__", None)
        facts: Description = {"kind": "class", "parents": []}
        if constructor:
            facts["parameters"] = _parameters(constructor)
        members = {name: _member(function) for name, function in sorted(functions.items())}
        return facts | {"members": members}

    def _functions(self, module: str, node: ast.ClassDef) -> dict[str, FunctionNode]:
        """Return public methods and the constructor, also those of parent classes of Ray."""
        found: dict[str, FunctionNode] = {}
        for base in reversed(node.bases):
            definition = self._find(module, ast.unparse(base))
            if definition and isinstance(definition[1], ast.ClassDef):
                found |= self._functions(definition[0], definition[1])
        own = {one.name: one for one in node.body if isinstance(one, FunctionNode)}
        names = [name for name in own if is_public(name) or name == "__init__"]
        return found | {name: own[name] for name in names}

    def _definition(self, module: str, name: str) -> tuple[str, ast.AST]:
        found = self._find(module, name)
        if found is None:
            raise SystemExit(f"{self._archive.filename} does not define {module}.{name}.")
        return found

    def _find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module that defines the name, and the node; None if it is not of Ray."""
        for node in ast.walk(self._tree(module)):
            match node:
                case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                    return module, node
                case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                    return module, value
                case ast.ImportFrom(module=str(source), names=aliases) if source.startswith("ray."):
                    for alias in aliases:
                        if (alias.asname or alias.name) == name:
                            return self._find(source, alias.name)
        return None

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            path = module.replace(".", "/")
            package = posixpath.join(path, "__init__.py")
            source = self._archive.read(package if package in self._files else f"{path}.py")
            self._trees[module] = ast.parse(source)
        return self._trees[module]


def _member(function: FunctionNode) -> Description:
    decorators = {ast.unparse(one) for one in function.decorator_list}
    if "property" in decorators:
        return {"kind": "property"}
    kinds = {"classmethod": "class method", "staticmethod": "static method"}
    kind = next((kinds[one] for one in decorators if one in kinds), "method")
    return {"kind": kind, "parameters": _parameters(function)}


def _parameters(function: FunctionNode) -> list[list[Any]]:
    return [list(one) for one in _listed(function.args) if one[0] not in ("self", "cls")]


def _listed(arguments: ast.arguments) -> Iterator[tuple[str, str, str | None]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for one, default in zip(positional, defaults, strict=True):
        yield one.arg, "positional", _text(default)
    if arguments.vararg:
        yield "*", "*", None
    for one, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield one.arg, "keyword only", _text(keyword_default)
    if arguments.kwarg:
        yield "**", "**", None


def _text(default: ast.expr | None) -> str | None:
    return None if default is None else ast.unparse(default)


if __name__ == "__main__":
    main(sys.argv[1:])
