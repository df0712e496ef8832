"""What may go wrong, and how often."""

import pytest

from spotfit.core.errors import TransientStoreError
from spotfit_localsim.dice import Dice
from spotfit_localsim.faults import Faults, Hazards, Line, Season


def test_a_line_fails_before_or_behind_the_deed_as_often_as_told() -> None:
    line = Line(Season(Faults(unsent=1.0, lost_answers=0.0)), Dice(1).stream("x"))
    with pytest.raises(TransientStoreError, match="never sent"):
        line.before()
    line.behind()
    line = Line(Season(Faults(unsent=0.0, lost_answers=1.0)), Dice(1).stream("x"))
    line.before()
    with pytest.raises(TransientStoreError, match="lost"):
        line.behind()


def test_a_slow_request_takes_its_time() -> None:
    line = Line(Season(Faults(slow=1.0, slow_s=(7.0, 7.0))), Dice(1).stream("x"))
    assert line.latency_s() == 7.0


def test_after_the_storm_nothing_goes_wrong_any_more() -> None:
    season = Season(Faults(unsent=1.0, freezes=1.0, deaths=1.0))
    hazards = Hazards(season, Dice(1).stream("x"))
    line = Line(season, Dice(1).stream("y"))
    assert hazards.next() is not None
    season.calm()
    assert hazards.next() is None
    line.before()


def test_requests_hang_one_by_one_or_all_at_once() -> None:
    season = Season(Faults(stalls=0.5, stall_s=(5.0, 60.0)))
    line = Line(season, Dice(1).stream("x"))
    own = [line.stalled_s(0.0) for _ in range(100)]
    assert 0 < own.count(0.0) < 100
    assert all(5.0 <= seconds <= 60.0 for seconds in own if seconds)
    season.stall(1000.0)
    assert all(line.stalled_s(900.0) >= 100.0 for _ in range(20))
    season.calm()
    assert Line(season, Dice(1).stream("x")).stalled_s(900.0) == 0.0


def test_who_is_not_mortal_only_freezes() -> None:
    faults = Faults(freezes=0.5, freeze_s=(1.0, 2.0), deaths=0.5)
    hazards = Hazards(Season(faults), Dice(1).stream("x"), mortal=False)
    met = [hazard for hazard in (hazards.next() for _ in range(100)) if hazard]
    assert met
    assert not any(hazard.kills for hazard in met)
    assert all(1.0 <= hazard.freezes_s <= 2.0 for hazard in met)
