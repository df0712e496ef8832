"""A saved state on its way into a training: planned, judged by all ranks, read, and adopted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from spotfit.core.errors import ConfigError
from spotfit.host import log
from spotfit.worker.recall import Planned

if TYPE_CHECKING:
    from spotfit.checkpoint.saved import Saved
    from spotfit.checkpoint.snapshot import Index
    from spotfit.frameworks.torch.fitting import Fit, Part
    from spotfit.frameworks.torch.position import Passes, Position
    from spotfit.frameworks.torch.reading import Loading
    from spotfit.frameworks.torch.room import Room
    from spotfit.frameworks.torch.state import Training

_GIVE = (
    "give them under these names (optimizer, scheduler, scaler, loader, extra, own) to go on with "
    "them"
)
_PLACE = frozenset(("place", "loader"))
"""As which a rank's place in its data is kept."""


class Restoring:
    """One rank's part in one `Checkpointer.restore()`."""

    def __init__(
        self,
        training: Training,
        own: Mapping[str, Any],
        place: Position | Passes | None,
        *,
        rank: int,
        world_size: int,
        surely: bool,
    ) -> None:
        """`own` is this rank's alone, `place` where it stands in its data.

        Where a checkpoint is `surely` there, nothing has to be kept of what is overwritten: should
        a state in memory be torn, that checkpoint overwrites it, or the run ends with its refusal.
        """
        self._training = training
        self._own = own
        self._place = place
        self._rank = rank
        self._world_size = world_size
        self._surely = surely
        self._incoming: dict[str, Any] = {}
        """What is read, until all ranks have read theirs."""
        self._loading: Loading | None = None
        self._room: Room = {}
        """What optimizers knew that have room for what is read."""
        self._put_back: Callable[[], None] = _nothing
        self._unused: list[str] = []
        """What was saved and is not given any more."""
        self._new: list[str] = []
        """What was not saved and is given now."""

    def planned(self, saved: Saved) -> Planned:
        """What this rank has to read of it, and how it fits. Raises `ConfigError`."""
        from spotfit.frameworks.torch.fitting import Fit, refuse_moved
        from spotfit.frameworks.torch.reading import Loading
        from spotfit.frameworks.torch.room import give_room
        from spotfit.frameworks.torch.state import renewed

        self._take_room_away()
        self._room = give_room(self._training, saved)
        self._incoming = renewed(self._training.state())  # FSDP's first kind meets others for it
        was, now = self._kept_beside(saved), self._given_beside()
        refuse_moved(was, now)
        if self._world_size != len(saved.indices):
            self._refuse_resized(saved)
        if not self._surely:  # were it torn, nothing else would overwrite it
            self._put_back = self._kept()
        self._loading = Loading(self._incoming, saved)
        return Planned(self._loading.orders, Fit(self._loading.left, was, now))

    def judge(self, fits: Sequence[Fit]) -> None:
        """Before any rank reads: what would be lost is refused by all, with `ConfigError`."""
        from spotfit.frameworks.torch.fitting import new, refuse_left, unused

        refuse_left(fits)
        self._unused, self._new = unused(fits), new(fits)

    def undo(self) -> None:
        """There is nothing to go on from: all is as it was before, but for what was overwritten
        where a checkpoint is surely there."""
        self._put_back()
        self._take_room_away()

    def adopt(self, saved: Saved) -> int:
        """Go on from what was read; the epoch it was saved in. Raises `ConfigError` for an object
        that does not take its state back."""
        self._room, self._put_back = {}, _nothing  # a copy of the state
        self._tell(self._training.adopt(self._incoming))
        if self._world_size == len(saved.indices):
            return self._go_on(saved)
        return self._go_on_resized(saved)

    # --- what fits -----------------------------------------------------------------------------

    def _kept_beside(self, saved: Saved) -> frozenset[Part]:
        from spotfit.frameworks.torch.fitting import LOADER
        from spotfit.frameworks.torch.reading import kept_beside

        mine = saved.indices[min(self._rank, len(saved.indices) - 1)]
        own = _own(mine)
        place = {LOADER} if _PLACE & own.keys() or (mine.epoch, mine.consumed) != (0, 0) else ()
        return kept_beside(saved).union(place, (("own", name) for name in own.get("own", ())))

    def _given_beside(self) -> frozenset[Part]:
        from spotfit.frameworks.torch.fitting import LOADER, OPTIMIZER

        optimizers = (OPTIMIZER for _ in self._training.optimizers)
        place = () if self._place is None else (LOADER,)
        others = (("extra", name) for name in self._training.others)
        return frozenset((*optimizers, *place, *others, *(("own", name) for name in self._own)))

    def _refuse_resized(self, saved: Saved) -> None:
        owns = [_own(index) for index in saved.indices]
        if self._own and "own" in owns[0]:
            raise ConfigError(
                f"{', '.join(sorted(self._own))} was kept by {len(owns)} ranks, each its "
                f"own, and {self._world_size} are to go on.",
                do="Keep the number of workers, or keep in extra={…} what all ranks share.",
            )
        if self._place is not None:
            self._place.refuse_resized(owns)

    # --- what is overwritten -------------------------------------------------------------------

    def _kept(self) -> Callable[[], None]:
        from spotfit.frameworks.torch.state import kept

        known = [one.state for one in self._training.optimizers if one not in self._room]
        return kept({**self._incoming, "optimizer": [list(state.values()) for state in known]})

    def _take_room_away(self) -> None:
        from spotfit.frameworks.torch.room import take_away

        take_away(self._room)
        self._room = {}

    # --- going on ------------------------------------------------------------------------------

    def _tell(self, blank: Sequence[str]) -> None:
        """What is not as it was."""
        assert self._loading is not None  # it was read
        if self._rank != 0:
            return
        if self._unused:
            log.warning("checkpoint.unused", names=self._unused, do=_GIVE)
        if cast := self._loading.cast:
            log.warning("checkpoint.cast", weights=len(cast), such_as=cast[0])
        if blank := [*self._new, *self._loading.anew, *blank]:
            log.warning("checkpoint.begins_anew", names=blank, why="nothing was kept of it")

    def _go_on(self, saved: Saved) -> int:
        from spotfit.frameworks.torch.state import give_back, put_back

        mine = saved.indices[self._rank]
        own = _own(mine)
        for name, state in own.get("own", {}).items():
            if name in self._own:
                give_back(state, name, self._own[name])
        put_back(own["dice"])
        if self._place is not None:
            self._place.go_on(mine.epoch, mine.consumed, own, partial(put_back, own["dice"]))
        return mine.epoch

    def _go_on_resized(self, saved: Saved) -> int:
        """With another number of ranks the dice are new, and what is left of the data is dealt."""
        first = saved.indices[0]
        if self._place is not None:
            owns = [_own(index) for index in saved.indices]
            self._place.go_on_resized(first.epoch, first.consumed, owns)
        return first.epoch


def _own(index: Index) -> dict[str, Any]:
    """What that rank kept of its own."""
    from spotfit.frameworks.torch.shares import unplain

    found: dict[str, Any] = unplain(index.own)
    return found


def _nothing() -> None:
    return
