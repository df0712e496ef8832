"""Moving a script that stands in a test: what comes out is Python, and moves no further."""

from __future__ import annotations

import textwrap

from spotfit.migrate.rewrite import Rewritten, rewrite


def move(script: str) -> Rewritten:
    moved = rewrite(textwrap.dedent(script).encode())
    assert rewrite(moved.text).text == moved.text, "a second move changes nothing"
    compile(moved.text, "<moved>", "exec")
    return moved


def moved(script: str) -> str:
    return move(script).text.decode()


def left(script: str) -> list[str]:
    """What is left to do by hand, as 'line: what'."""
    return [f"{note.line}: {note.what}" for note in move(script).left]


def text(script: str) -> str:
    return textwrap.dedent(script)
