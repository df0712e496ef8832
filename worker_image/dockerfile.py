"""A Dockerfile read as its steps: as much of the language as ours speak, and not a word more."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = ("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "LABEL", "RUN", "USER", "WORKDIR")


@dataclass(frozen=True)
class Step:
    """One instruction: `word`, and what follows it on the line."""

    word: str
    rest: str

    def words(self) -> list[str]:
        """What follows: a list in JSON, or words as a shell parts them."""
        if self.rest.startswith("["):
            words: list[str] = json.loads(self.rest)
            return words
        return shlex.split(self.rest)

    def pairs(self) -> dict[str, str]:
        """`NAME=value` for each of the words; a name alone has an empty value."""
        return {name: value for name, _, value in (word.partition("=") for word in self.words())}


@dataclass
class Stage:
    """An image in the making."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def last(self, word: str) -> Step | None:
        """The step of that kind that counts."""
        return next((step for step in reversed(self.steps) if step.word == word), None)


def read(file: Path, arguments: Mapping[str, str]) -> list[Stage]:
    """Its stages, the last of which is the image. Raises `ValueError` for what we do not speak."""
    given: dict[str, str] = {}
    stages: list[Stage] = []
    for step in _steps(file.read_text()):
        if step.word == "FROM":
            base, _, name = step.rest.partition(" AS ")
            stages.append(Stage(filled(base.strip(), given), name.strip() or str(len(stages))))
        elif step.word not in KNOWN:
            raise ValueError(f"{file.name}: {step.word} is not understood here; teach it first.")
        elif stages:
            stages[-1].steps.append(step)
        else:
            given |= {name: arguments.get(name, value) for name, value in step.pairs().items()}
    return stages


def filled(text: str, values: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` replaced; a name that nobody knows is empty, as for Docker."""
    pattern = r"\$(?:\{(\w+)\}|(\w+))"
    return re.sub(pattern, lambda found: values.get(found[1] or found[2], ""), text)


def _steps(text: str) -> list[Step]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    parted = (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
    return [Step(word.upper(), rest.strip()) for word, _, rest in parted]
