"""How many seeds each scenario is lived through: few in the everyday run, many on demand."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, help="seeds of every scenario in tests/sim")
    parser.addoption("--cases", type=int, default=300, help="cases of tests/sim/test_object_fuzz")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    """The seeds of this run: `pytest tests/sim --seeds 200` for more than the usual ones."""
    chosen = request.config.getoption("--seeds", default=None)
    return range(int(chosen or 10))
