"""Functions of the user: arguments, resources and identity."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.context import ActorPoolStrategy, TaskPoolStrategy
from spotfit.data.user_functions import check_resources, user_function


class Adder:
    created = 0

    def __init__(self, amount: int, *, factor: int = 1) -> None:
        type(self).created += 1
        self.amount = amount * factor

    def __call__(self, value: int) -> int:
        return value + self.amount


def scale(value: int, factor: int = 1, *, offset: int = 0) -> int:
    return value * factor + offset


def test_a_function_gets_its_further_arguments() -> None:
    function = user_function("map", scale, {"fn_args": [3], "fn_kwargs": {"offset": 1}})
    assert function.bind()(2) == 7


def test_a_class_is_created_once_for_each_binding() -> None:
    options = {"fn_constructor_args": [2], "fn_constructor_kwargs": {"factor": 5}}
    function = user_function("map", Adder, options)
    before = Adder.created
    call = function.bind()
    assert [call(1), call(2)] == [11, 12]
    assert Adder.created == before + 1


def test_constructor_arguments_require_a_class() -> None:
    with pytest.raises(ConfigError, match="require a class"):
        user_function("map", scale, {"fn_constructor_args": [1]})


def test_an_object_that_is_not_callable_is_refused() -> None:
    with pytest.raises(ConfigTypeError, match="not callable"):
        user_function("map", 5, {})


async def asynchronous(value: int) -> int:
    return value


class AsynchronousCall:
    async def __call__(self, value: int) -> int:
        return value


@pytest.mark.parametrize("function", [asynchronous, AsynchronousCall])
def test_asynchronous_functions_are_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match="asynchronous"):
        user_function("map", function, {})


def test_gpus_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="num_gpus=1") as caught:
        user_function("map_batches", scale, {"num_gpus": 1})
    assert "spotfit.predict()" in caught.value.do


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 0, "num_cpus": 4, "memory": 1e9, "x": 1},
        {"concurrency": 3},
        {"concurrency": (2, 5)},
        {"concurrency": (2, 5, 3)},
        {"compute": ActorPoolStrategy(min_size=2, max_size=6)},
        {"compute": TaskPoolStrategy(7)},
        {"compute": "actors"},
    ],
)
def test_other_resources_have_no_effect(options: dict[str, Any]) -> None:
    assert user_function("map", scale, options).identity == user_function("map", scale, {}).identity


@pytest.mark.parametrize(
    "options", [{"concurrency": 0}, {"concurrency": (5, 2)}, {"concurrency": "4"}, {"compute": 4}]
)
def test_an_invalid_number_of_processes_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        check_resources("map(f)", options)


def test_an_exception_of_the_user_has_a_note_with_the_function() -> None:
    def fail(_value: int) -> int:
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        user_function("map_batches", fail, {}).bind()(1)
    assert caught.value.__notes__ == ["Raised in map_batches(fail) of a dataset."]


def test_the_identity_depends_on_code_and_arguments() -> None:
    def other(value: int) -> int:
        return value + 1

    calls = [
        user_function("map", scale, {}),
        user_function("map", scale, {"fn_args": [2]}),
        user_function("map", functools.partial(scale, factor=2), {}),
        user_function("map", other, {}),
        user_function("map", Adder, {"fn_constructor_args": [1]}),
        user_function("map", Adder, {"fn_constructor_args": [2]}),
        user_function("map", Adder(1), {}),
        user_function("map", Adder(2).__call__, {}),
    ]
    assert len({call.identity for call in calls}) == len(calls)


def test_equal_code_has_one_identity_in_every_process() -> None:
    program = (
        "from spotfit.data.user_functions import user_function\n"
        "def f(x, names={'a', 'b', 'c'}): return x in names\n"
        "print(user_function('map', f, {'fn_args': ('q', 3)}).identity)\n"
    )
    identities = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(identities) == 1


def test_a_changed_method_changes_the_identity_of_a_class() -> None:
    def make(amount: int) -> Any:
        class Model:
            def __call__(self, value: int) -> int:
                return value + (1 if amount else 2)

            if amount:

                def helper(self) -> int:
                    return 1

        return Model

    identities = {user_function("map", make(amount), {}).identity for amount in (0, 1)}
    assert len(identities) == 2
