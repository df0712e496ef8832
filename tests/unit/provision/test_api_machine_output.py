"""The output of machines, from backends that keep it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spotfit.core.ids import Token
from spotfit.model.group import GroupHandle
from spotfit.provision.api import MachineOutput, fetch_machine_output, last_lines

HANDLE = GroupHandle(token=Token("t-1"), provisioner="backend", name="t-1")


def backend(*, keeps_output: bool) -> Any:
    def fetch(handle: GroupHandle, node: int, *, max_lines: int) -> list[MachineOutput]:
        return [MachineOutput(f"{handle.token}/{node}", ("one",) * max_lines)]

    return SimpleNamespace(
        traits=SimpleNamespace(keeps_output=keeps_output), fetch_machine_output=fetch
    )


def test_output_is_fetched_only_from_backends_that_keep_it() -> None:
    assert fetch_machine_output(backend(keeps_output=True), HANDLE, 1, max_lines=2) == [
        MachineOutput("t-1/1", ("one", "one"))
    ]
    assert fetch_machine_output(backend(keeps_output=False), HANDLE, 1) == ()


@pytest.mark.parametrize(
    ("text", "last", "lines"),
    [("a\nb\nc\n", 2, ("b", "c")), ("a", 5, ("a",)), ("", 5, ()), ("a\nb", 0, ())],
)
def test_last_lines_returns_at_most_the_given_number(
    text: str, last: int, lines: tuple[str, ...]
) -> None:
    assert last_lines(text, last) == lines
