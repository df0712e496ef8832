"""A few stories of chaos; `make chaos` plays many."""

from pathlib import Path

import pytest

from spotfit_localsim.live import bad_wire
from spotfit_localsim.live.chaos import Blow, Story, Theatre, wire_to_a_store
from spotfit_localsim.live.victims import Kind


@pytest.mark.parametrize("whom", ["worker", "agent", "leader", "node", "zygote", "driver"])
def test_whoever_is_killed_the_result_is_the_same(tmp_path: Path, whom: Kind) -> None:
    story = Story(1, "count", "file", bad_wire.fair(), (Blow(1.0, whom),))
    ending = Theatre(tmp_path, within_s=90.0).play(story, "")
    assert ending.wrong == []
    assert len(ending.told) == 1, "nobody was killed"


@pytest.mark.slow
def test_on_a_bad_wire_too(tmp_path: Path) -> None:
    weather = bad_wire.Weather(refused=0.03, unanswered=0.02, slow=0.05, seed=3)
    story = Story(3, "count", "s3", weather, (Blow(1.5, "leader"), Blow(2.0, "driver")))
    with wire_to_a_store() as wire:
        assert Theatre(tmp_path, within_s=90.0).play(story, wire).wrong == []


@pytest.mark.slow
def test_with_torch_too(tmp_path: Path) -> None:
    story = Story(5, "descend", "file", bad_wire.fair(), (Blow(4.0, "node"), Blow(7.0, "worker")))
    assert Theatre(tmp_path, within_s=90.0).play(story, "").wrong == []
