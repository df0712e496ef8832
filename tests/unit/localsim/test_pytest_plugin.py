"""The pytest plugin for users, in separate pytest runs."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.real_time("starts a simulated cloud")


def test_cloud_is_chosen_by_the_marker_or_else_by_the_option(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.spot_cloud("plain", seed=7)
        def test_marked(spot_cloud):
            assert spot_cloud.provider.options.cloud == "plain"
            assert spot_cloud.provider.options.seed == 7
            assert os.environ["SPOTFIT_PROVISIONER"] == spot_cloud.provisioner

        def test_unmarked(spot_cloud):
            assert spot_cloud.provider.options.cloud == "kubernetes"
            assert spot_cloud.machines() == []
        """
    )
    result = pytester.runpytest_subprocess("--strict-markers", "--spot-cloud=kubernetes")
    result.assert_outcomes(passed=2)


def test_unreached_step_fails_the_test_at_teardown(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_without_training(reclaim_at):
            reclaim_at(step=5)
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*reclaim_at(5) was never reached*"])


def test_plugin_without_its_fixtures_imports_neither_spotfit_nor_the_simulators(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_imports():
            packages = ("spotfit.", "spotfit_localsim.", "spotfit_provisioners.")
            loaded = {name for name in sys.modules if f"{name}.".startswith(packages)}
            assert loaded == {"spotfit_localsim", "spotfit_localsim.pytest_plugin"}
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
