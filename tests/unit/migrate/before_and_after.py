"""Helpers that migrate a script in a string, and check that the result is stable."""

from __future__ import annotations

import textwrap

from spotfit.migrate.edit import RewrittenScript, rewrite_script


def migrate_script(script: str) -> RewrittenScript:
    moved = rewrite_script(textwrap.dedent(script).encode())
    assert rewrite_script(moved.text).text == moved.text, "a second migration changes nothing"
    compile(moved.text, "<moved>", "exec")
    return moved


def migrated_text(script: str) -> str:
    return migrate_script(script).text.decode()


def manual_work(script: str) -> list[str]:
    """What is left to do by hand, as 'line: what'."""
    return [f"{note.line}: {note.what}" for note in migrate_script(script).manual_notes]


def dedent_script(script: str) -> str:
    return textwrap.dedent(script)
