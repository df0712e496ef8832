"""The number of seeds per scenario: few by default, many with `--seeds`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, help="seeds of every scenario in tests/sim")
    parser.addoption("--cases", type=int, default=300, help="cases of tests/sim/test_object_fuzz")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    """The seeds of this test session, by default ten; `pytest tests/sim --seeds 200` runs more."""
    configured = request.config.getoption("--seeds", default=None)
    return range(int(configured or 10))
