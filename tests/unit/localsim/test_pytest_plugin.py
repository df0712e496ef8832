"""The fixtures users get, in test runs of their own: pytest finds them by itself."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")


def test_a_test_gets_a_cloud_as_its_mark_or_else_the_command_says(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.spot_cloud("plain", seed=7)
        def test_marked(spot_cloud):
            assert spot_cloud.sim.options.cloud == "plain"
            assert spot_cloud.sim.options.seed == 7
            assert os.environ["SPOTFIT_PROVISIONER"] == spot_cloud.provisioner

        def test_told(spot_cloud):
            assert spot_cloud.sim.options.cloud == "kubernetes"
            assert spot_cloud.machines() == []
        """
    )
    done = pytester.runpytest_subprocess("--strict-markers", "--spot-cloud=kubernetes")
    done.assert_outcomes(passed=2)


def test_a_step_that_is_never_reached_is_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_nothing_is_trained(reclaim_at):
            reclaim_at(step=5)
        """
    )
    done = pytester.runpytest_subprocess()
    done.assert_outcomes(passed=1, errors=1)
    done.stdout.fnmatch_lines(["*reclaim_at(5) was never reached*"])


def test_without_a_cloud_nothing_of_it_is_imported(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_light():
            heavy = [name for name in ("torch", "boto3", "spotfit.worker") if name in sys.modules]
            assert not heavy
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
