"""One script, from its text to its new text and what there is to tell about it."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper

from spotfit.core.errors import ConfigError
from spotfit.migrate.edit import Editor
from spotfit.migrate.imports import new_imports
from spotfit.migrate.plan import Note, make_plan, trainers_that_stay
from spotfit.migrate.survey import survey


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A script as it is now, and what was dropped or is left to do by hand, by line."""

    text: bytes
    notes: tuple[Note, ...]

    @property
    def left(self) -> tuple[Note, ...]:
        """What is left to do by hand."""
        return tuple(note for note in self.notes if note.by_hand)


def rewrite(source: bytes, *, name: str = "<script>") -> Rewritten:
    """Move what can be moved. A script that says nothing of Ray comes back as it is.

    Raises `ConfigError` for what is no Python.
    """
    try:
        module = cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError(f"{name} is no Python: {error}", do="Correct it first.") from error
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    found = survey(wrapper)
    if whole := trainers_that_stay(found):
        return Rewritten(source, tuple(whole))
    plan = make_plan(found)
    moved = wrapper.module.visit(Editor(plan, new_imports(found, plan)))
    return Rewritten(moved.bytes, tuple(plan.notes))
