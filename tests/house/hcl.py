"""Parses Terraform files and infers the types of expressions, without providers."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hcl2
import pytest

from tests.house.tree import ROOT

TERRAFORM = ROOT / "infra" / "terraform"
MODULES = sorted(path for path in (TERRAFORM / "modules").iterdir() if path.is_dir())
STACKS = sorted(path for path in (TERRAFORM / "stacks").iterdir() if path.is_dir())

NEEDS_TERRAFORM = pytest.mark.skipif(
    not shutil.which("terraform"),
    reason="terraform is not installed; https://developer.hashicorp.com/terraform/install",
)

_NO_PROVIDER = re.compile(r"Failed to (query available provider packages|install provider)")


def skip_without_provider(init: subprocess.CompletedProcess[str]) -> None:
    """Skip the test if `terraform init` could not get a provider; other errors fail it."""
    if init.returncode == 0:
        return
    # The message is in a box, and wrapped at the width of a terminal.
    text = " ".join(init.stderr.replace("│", " ").split())
    if _NO_PROVIDER.search(text):
        pytest.skip(
            "terraform has no AWS provider; where its registry is out of reach, set "
            "TF_CLI_ARGS_init=-plugin-dir=FOLDER"
        )
    pytest.fail(f"terraform init failed: {text[-4000:]}")


_KIND_BY_TYPE = {"list": "list", "set": "list", "tuple": "list", "map": "map", "object": "map"}
_INTERPOLATION = re.compile(r"\$\{(.*)\}", re.DOTALL)


@dataclass(frozen=True)
class TerraformFolder:
    """The blocks of the `.tf` files of one folder."""

    path: Path
    blocks: dict[str, Any]

    @property
    def variables(self) -> dict[str, dict[str, Any]]:
        return _blocks_by_name(self.blocks.get("variable", []))

    @property
    def outputs(self) -> dict[str, dict[str, Any]]:
        return _blocks_by_name(self.blocks.get("output", []))

    @property
    def module_calls(self) -> dict[str, dict[str, Any]]:
        """Module calls by name."""
        return _blocks_by_name(self.blocks.get("module", []))

    @property
    def locals(self) -> dict[str, Any]:
        result = [pair for block in self.blocks.get("locals", []) for pair in block.items()]
        return {name: value for name, value in result if not name.startswith("__")}

    def declared_names(self, kind: str) -> set[str]:
        """`type.name` of every resource or data source."""
        return {
            f"{unquoted(type_)}.{unquoted(name)}"
            for block in self.blocks.get(kind, [])
            for type_, named in block.items()
            if not type_.startswith("__")
            for name in named
            if not name.startswith("__")
        }

    def called_module(self, name: str) -> TerraformFolder:
        return load_folder((self.path / unquoted(self.module_calls[name]["source"])).resolve())

    @property
    def text(self) -> str:
        """The lines without comments."""
        lines = [
            line
            for file in sorted(self.path.glob("*.tf"))
            for line in file.read_text().splitlines()
            if not line.lstrip().startswith("#")
        ]
        return "\n".join(lines)

    def kind_of(self, value: Any) -> str:
        """Return string, number, bool, list or map. Attributes of resources count as strings."""
        for kind, python in (("list", list), ("map", dict), ("bool", bool)):
            if isinstance(value, python):
                return kind
        if not isinstance(value, str):
            return "number"
        interpolation = _INTERPOLATION.fullmatch(value)
        return self._kind_of_expression(interpolation[1].strip()) if interpolation else "string"

    def _kind_of_expression(self, expression: str) -> str:
        if choice := re.fullmatch(r".*?\?(.*) : (.*)", expression, re.DOTALL):
            kinds = {self._kind_of_expression(one.strip()) for one in choice.groups()}
            assert len(kinds) == 1, f"{self.path.name}: {expression} is {kinds}"
            return kinds.pop()
        if expression in ("true", "false"):
            return "bool"
        if expression[0] in "[{":
            return "list" if expression[0] == "[" else "map"
        if re.fullmatch(r"-?\d+(\.\d+)?", expression):
            return "number"
        if known := re.fullmatch(r"var\.(\w+)", expression):
            return self._kind_of_variable(known[1])
        if known := re.fullmatch(r"local\.(\w+)", expression):
            return self.kind_of(self.locals[known[1]])
        if known := re.fullmatch(r"module\.(\w+)\.(\w+)", expression):
            inner = self.called_module(known[1])
            return inner.kind_of(inner.outputs[known[2]]["value"])
        return "string"

    def _kind_of_variable(self, name: str) -> str:
        result = unquoted(self.variables[name]["type"])
        interpolation = _INTERPOLATION.fullmatch(result)
        type_name = re.split(r"\W", interpolation[1] if interpolation else result)[0]
        return _KIND_BY_TYPE.get(type_name, type_name)


@cache
def load_folder(path: Path) -> TerraformFolder:
    blocks: dict[str, Any] = {}
    for file in sorted(path.glob("*.tf")):
        for kind, found in hcl2.loads(file.read_text()).items():
            blocks[kind] = blocks.get(kind, []) + found
    return TerraformFolder(path, blocks)


def unquoted(text: str) -> str:
    return text.strip('"')


def _blocks_by_name(blocks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        unquoted(name): body
        for block in blocks
        for name, body in block.items()
        if not name.startswith("__")
    }
