"""Migration of one script: parse, scan, plan, edit."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper

from spotfit.core.errors import ConfigError
from spotfit.migrate.edit import Editor
from spotfit.migrate.imports import rewrite_imports
from spotfit.migrate.migration_plan import MigrationNote, make_plan, unsupported_trainers
from spotfit.migrate.usage_scan import scan_usage


@dataclass(frozen=True, slots=True)
class RewrittenScript:
    """The new text of a script, and notes about removed code and manual changes, by line."""

    text: bytes
    notes: tuple[MigrationNote, ...]

    @property
    def manual_notes(self) -> tuple[MigrationNote, ...]:
        """Notes that require a manual change."""
        return tuple(note for note in self.notes if note.is_manual)


def rewrite_script(source: bytes, *, name: str = "<script>") -> RewrittenScript:
    """Migrate a script. A script that does not use Ray is returned unchanged.

    Raises `ConfigError` if the source is not valid Python.
    """
    try:
        module = cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError(
            f"{name} is not valid Python: {error}",
            do="Correct the syntax error, then migrate the script again.",
        ) from error
    # The module is used nowhere else, so the default deep copy of the tree is unnecessary.
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    scan = scan_usage(wrapper)
    if notes := unsupported_trainers(scan):
        return RewrittenScript(source, tuple(notes))
    plan = make_plan(scan)
    edited = wrapper.module.visit(Editor(plan, rewrite_imports(scan, plan)))
    return RewrittenScript(edited.bytes, tuple(plan.notes))
