"""Settings of the data layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.context import (
    ActorPoolStrategy,
    DataContext,
    ExecutionOptions,
    ExecutionResources,
    TaskPoolStrategy,
)


@pytest.fixture(autouse=True)
def restore_context() -> Iterator[None]:
    before = DataContext.get_current()
    DataContext._set_current(before.copy())
    yield
    DataContext._set_current(before)


def test_the_context_of_a_process_is_one_object() -> None:
    DataContext.get_current().enable_progress_bars = False
    assert DataContext.get_current().enable_progress_bars is False


def test_settings_of_ray_are_accepted_and_kept() -> None:
    context = DataContext.get_current()
    context.target_max_block_size = 2**20
    context.execution_options.verbose_progress = False
    assert context.target_max_block_size == 2**20
    assert context.shuffle_strategy is None


def test_a_copy_is_independent() -> None:
    context = DataContext.get_current()
    copy = context.copy()
    copy.execution_options.resource_limits = ExecutionResources(cpu=1)
    assert context.execution_options.resource_limits.cpu is None


def test_a_limit_may_be_set_where_it_is_as_in_older_scripts() -> None:
    limits = DataContext.get_current().execution_options.resource_limits
    limits.cpu = 4
    assert DataContext.get_current().execution_options.resource_limits.cpu == 4
    assert limits.copy(memory=100) == ExecutionResources.for_limits(cpu=4, memory=100)
    assert limits.memory is None


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu=-1"):
        ExecutionOptions(resource_limits=ExecutionResources(cpu=-1)).validate()


def test_pool_strategies_have_a_range_of_processes() -> None:
    pools = [ActorPoolStrategy(), ActorPoolStrategy(size=2), ActorPoolStrategy(max_size=3)]
    assert [(one.min_size, one.max_size) for one in pools] == [(1, None), (2, 2), (1, 3)]


@pytest.mark.parametrize(
    "arguments", [{"size": 2, "max_size": 3}, {"min_size": 3, "max_size": 2}, {"min_size": -1}]
)
def test_an_invalid_pool_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="ActorPoolStrategy"):
        ActorPoolStrategy(**arguments)  # type: ignore[arg-type]


def test_an_invalid_number_of_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="TaskPoolStrategy"):
        TaskPoolStrategy(0)
