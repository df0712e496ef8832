"""Parses the subset of the Dockerfile language that our Dockerfiles use."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SUPPORTED = ("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "LABEL", "RUN", "USER", "WORKDIR")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its keyword, and the rest of the line."""

    word: str
    rest: str

    def words(self) -> list[str]:
        """Return the arguments: a JSON list, or words split as by a shell."""
        if self.rest.startswith("["):
            words: list[str] = json.loads(self.rest)
            return words
        return shlex.split(self.rest)

    def pairs(self) -> dict[str, str]:
        """Return the arguments as `NAME=value` pairs; a name alone has an empty value."""
        return {name: value for name, _, value in (word.partition("=") for word in self.words())}


@dataclass
class Stage:
    """A build stage."""

    base: str
    name: str
    steps: list[Instruction] = field(default_factory=list)

    def last(self, word: str) -> Instruction | None:
        """Return the last step with this keyword, which is the effective one."""
        return next((step for step in reversed(self.steps) if step.word == word), None)


def read(file: Path, arguments: Mapping[str, str]) -> list[Stage]:
    """Return the stages, the image last. Raises `ValueError` for unknown instructions."""
    build_arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for step in _steps(file.read_text()):
        if step.word == "FROM":
            base, _, name = step.rest.partition(" AS ")
            stages.append(
                Stage(substitute(base.strip(), build_arguments), name.strip() or str(len(stages)))
            )
        elif step.word not in SUPPORTED:
            raise ValueError(f"{file.name}: {step.word} is not supported; add it to SUPPORTED.")
        elif stages:
            stages[-1].steps.append(step)
        else:
            build_arguments |= {
                name: arguments.get(name, value) for name, value in step.pairs().items()
            }
    return stages


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}`; unknown names are empty, as in Docker."""
    pattern = r"\$(?:\{(\w+)\}|(\w+))"
    return re.sub(pattern, lambda found: values.get(found[1] or found[2], ""), text)


def _steps(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    parts = (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
    return [Instruction(word.upper(), rest.strip()) for word, _, rest in parts]
