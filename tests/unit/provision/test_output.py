"""What a machine printed is asked of backends that keep it, and of no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spotfit.core.ids import Token
from spotfit.model.group import GroupHandle
from spotfit.provision.output import Said, said, tail

HANDLE = GroupHandle(Token("t-1"), "backend", "t-1")


def backend(*, keeps_output: bool) -> Any:
    def told(handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        return [Said(f"{handle.token}/{node}", ("one",) * last)]

    return SimpleNamespace(traits=SimpleNamespace(keeps_output=keeps_output), said=told)


def test_who_keeps_output_is_asked_and_nobody_else() -> None:
    assert said(backend(keeps_output=True), HANDLE, 1, last=2) == [Said("t-1/1", ("one", "one"))]
    assert said(backend(keeps_output=False), HANDLE, 1) == ()


@pytest.mark.parametrize(
    ("text", "last", "lines"),
    [("a\nb\nc\n", 2, ("b", "c")), ("a", 5, ("a",)), ("", 5, ()), ("a\nb", 0, ())],
)
def test_the_last_lines(text: str, last: int, lines: tuple[str, ...]) -> None:
    assert tail(text, last) == lines
