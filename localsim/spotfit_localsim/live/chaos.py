"""Random misfortune, live: real processes are killed at any moment, and the result must not change.

`python -m spotfit_localsim.live.chaos --seeds 20` runs small trainings of four workers on two
nodes. A seed decides what is trained, where it is stored, how bad the wire to the store is, and
who is killed when. Whatever happened, these hold: the result is that of an undisturbed run, no
committed checkpoint is lost, no step counts twice, no machine is paid twice, and no process or
directory is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

import spotfit
from spotfit.agent import driver
from spotfit.agent.zygote import ZygoteKeeper
from spotfit.core.codec import encode
from spotfit.core.errors import RunNotFoundError, TransientStoreError
from spotfit.host import env
from spotfit.host.clocks import SystemClock, wall_ms
from spotfit.ledger import keys
from spotfit.provision.launch import Assignment
from spotfit.store.api import Store
from spotfit.store.opening import open_store
from spotfit_localsim.dice import Dice, Stream
from spotfit_localsim.live import bad_wire, jobs, mines, saves
from spotfit_localsim.live.audit import Audit
from spotfit_localsim.live.mines import MARK, MOMENTS, Mine
from spotfit_localsim.live.options import LocalOptions
from spotfit_localsim.live.places import Root
from spotfit_localsim.live.victims import Kind, Victims, mourned, with_mark

_ME = "spotfit_localsim.live.chaos"
_AGENT = f"{_ME}:serve"
_WORKERS, _NODES = 4, 2
_LOOK_EVERY_S = 0.01
_LOOK_BEHIND_EVERY_S = 0.1
_QUIET_WITHIN_S = 30.0
"""Long enough for a call that hangs to be given up, and made again. Where a story may take longer,
the machine is slow: then so may deleting what is left, half as long."""
_WELL_BEFORE = 0.6
_TAKES = 3
"""A story whose blows come after its end proves nothing: so often it is played, ever sooner."""
_STALL_S = (5.0, 30.0)
_FEW = (0, 0, 1, 1, 2)
_FOR_A_STALL_S = 60.0
"""How much longer a story may take in which the bucket hangs."""


class Blow(msgspec.Struct, frozen=True):
    """Somebody is killed, so long after the story began or as soon as there is one."""

    at_s: float
    whom: Kind


class Stall(msgspec.Struct, frozen=True):
    """The bucket hangs for so long, that long after the story began or as soon as somebody works.

    Before that, `fit()` may rightly say that it cannot reach the bucket.
    """

    at_s: float
    for_s: float


class Harm(msgspec.Struct, frozen=True):
    """A file of the latest checkpoint is damaged, that long after the story began or as soon as
    there are two; and all machines are taken away, lest memory make up for it."""

    at_s: float
    how: Literal["flip", "cut", "delete"]


Job = Literal["count", "descend", "keep", "learn"]
"""The last two save as a Checkpointer does."""


class Story(msgspec.Struct, frozen=True):
    """All that a seed decides."""

    seed: int
    job: Job
    store: Literal["file", "s3"]
    weather: bad_wire.Weather
    blows: tuple[Blow, ...]
    stall: Stall | None = None
    mines: tuple[Mine, ...] = ()
    harm: Harm | None = None
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    steps: int = 40
    save_every: int = 5
    pace_s: float = 0.03
    take: int = 0
    """How often it was played before, with its blows later."""

    @property
    def name(self) -> str:
        """Of its run."""
        return f"story-{self.seed}-{self.take}"

    def sooner(self, lasted_s: float) -> Story:
        """The same again, with every blow well before the time at which its run ended."""
        last = max((blow.at_s for blow in self.blows), default=0.0)
        scale = min(1.0, _WELL_BEFORE * lasted_s / last) if last > 0 else 1.0
        blows = tuple(Blow(blow.at_s * scale, blow.whom) for blow in self.blows)
        return replace(self, blows=blows, take=self.take + 1)

    @property
    def workers(self) -> int:
        """On two nodes. What more than two add up in torch depends on when they begin."""
        return 2 if self.job == "learn" else _WORKERS

    def config(self, folder: Path) -> dict[str, Any]:
        """What the training function gets."""
        return {
            "steps": self.steps,
            "save_every": self.save_every,
            "pace_s": self.pace_s,
            "strategy": self.strategy,
            "folder": str(folder),
        }


def story_of(seed: int, *, torch: float = 0.1) -> Story:
    """The same story for the same seed; a share of them trains with torch."""
    stream = Dice(seed).stream("story")
    job: Literal["count", "descend"] = "descend" if stream.chance(torch) else "count"
    store: Literal["file", "s3"] = "s3" if stream.chance(0.5) else "file"
    weather = bad_wire.Weather(
        refused=stream.between((0.0, 0.05)),
        unanswered=stream.between((0.0, 0.03)),
        slow=stream.between((0.0, 0.1)),
        seed=seed,
    )
    kinds: list[Kind] = ["worker", "agent", "leader", "node", "zygote", "driver"]
    span_s = (0.0, 3.0 if job == "count" else 8.0)
    count = 1 + min(3, int(stream.expovariate(0.8)))
    blows = [Blow(stream.between(span_s), stream.choice(kinds)) for _ in range(count)]
    blows.sort(key=lambda blow: blow.at_s)
    if store == "file":
        return Story(seed, job, store, bad_wire.fair(), tuple(blows))
    if stream.chance(0.2):
        weather = replace(weather, stalled=0.005, stall_s=stream.between(_STALL_S))
    stall = Stall(stream.between(span_s), stream.between(_STALL_S)) if stream.chance(0.3) else None
    return Story(seed, job, store, weather, tuple(blows), stall)


def story_of_saves(seed: int, *, torch: float = 0.1) -> Story:
    """One that saves often, and in which most of what happens happens to saves."""
    stream = Dice(seed).stream("story of saves")
    job: Job = "learn" if stream.chance(torch) else "keep"
    store: Literal["file", "s3"] = "s3" if stream.chance(0.6) else "file"
    span_s = (0.0, 4.0 if job == "keep" else 8.0)
    kinds: list[Kind] = ["worker", "agent", "node", "everybody", "carrier", "carrier", "driver"]
    blows = [Blow(stream.between(span_s), stream.choice(kinds)) for _ in range(stream.choice(_FEW))]
    laid = [_mine(stream) for _ in range(1 + stream.choice(_FEW))]
    hows: list[Literal["flip", "cut", "delete"]] = ["flip", "cut", "delete"]
    harm = Harm(stream.between(span_s), stream.choice(hows)) if stream.chance(0.25) else None
    story = Story(
        seed,
        job,
        store,
        bad_wire.fair(),
        tuple(sorted(blows, key=lambda blow: blow.at_s)),
        mines=tuple(laid),
        harm=harm,
        strategy="fsdp2" if stream.chance(0.5) else "ddp",
        save_every=stream.choice([2, 4, 5]),
    )
    return story if store == "file" else _in_bad_weather(story, stream, span_s)


def _mine(stream: Stream) -> Mine:
    moment = stream.choice(sorted(MOMENTS))
    full = MOMENTS[moment].full and stream.chance(0.5)
    return Mine(moment, 1 + min(7, int(stream.expovariate(0.5))), "is full" if full else "dies")


def _in_bad_weather(story: Story, stream: Stream, span_s: tuple[float, float]) -> Story:
    weather = bad_wire.Weather(
        refused=stream.between((0.0, 0.1)),
        unanswered=stream.between((0.0, 0.05)),
        slow=stream.between((0.0, 0.3)),
        slow_s=stream.between((0.1, 1.0)),
        seed=story.seed,
    )
    stall = Stall(stream.between(span_s), stream.between(_STALL_S)) if stream.chance(0.1) else None
    return replace(story, weather=weather, stall=stall)


# --- one story --------------------------------------------------------------------------------


class Stage:
    """Where one story is played: a folder of its own, in which nothing may be left."""

    def __init__(self, story: Story, folder: Path, wire: str) -> None:
        self.story = story
        self.folder = folder
        self.wire = wire
        self.root = Root(folder / "machines")
        self.storage = "s3://chaos/runs" if story.store == "s3" else str(folder / "store")
        self.url = f"{self.storage}/{story.name}"
        self.began_ms = 0
        self.struck_ms: list[int] = []
        """When each blow fell."""
        self.stepped_on = 0
        """Mines on which somebody stepped."""
        self.harmed: set[str] = set()
        """Checkpoints of which a file was damaged."""
        (folder / "tmp").mkdir(parents=True)
        (folder / "logs").mkdir()
        (folder / "story.json").write_bytes(encode(story))
        mines.put(story.mines, folder)

    def environment(self) -> dict[str, str]:
        """For everybody on it."""
        return env.everything() | {
            MARK: str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "SPOTFIT_HOME": str(self.folder / "keys"),
            "AWS_ENDPOINT_URL": self.wire,
            "AWS_ACCESS_KEY_ID": "chaos",
            "AWS_SECRET_ACCESS_KEY": "chaos",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def play(self, *, within_s: float) -> Audit:
        """Let it happen; what came of it."""
        if self.story.store == "s3":
            _make_bucket(self.wire)
            bad_wire.change_weather(self.wire, self.story.weather)
        hangs = self.story.stall is not None or self.story.weather.stalled > 0
        ended_well = self._until_the_end(within_s + _FOR_A_STALL_S * hangs)
        if self.story.store == "s3":
            bad_wire.change_weather(self.wire, bad_wire.fair())
        left = self._left_behind(max(_QUIET_WITHIN_S, within_s / 2))
        stepped_on = mines.sprung(self.folder)
        self.stepped_on = len(stepped_on)
        for struck_ms, told in stepped_on:
            self.struck_ms.append(struck_ms)
            self._tell(f"{(struck_ms - self.began_ms) / 1000:6.2f} s  {told}")
        with _environment(self.environment()):
            return Audit.of(
                url=self.url,
                result=_read(self.folder / "result") if ended_well else None,
                paid=(_read(self.folder / "paid") or "").splitlines(),
                left=left,
                harmed=self.harmed,
            )

    def _until_the_end(self, within_s: float) -> bool:
        clock = SystemClock()
        began, self.began_ms = clock.now(), wall_ms()
        blows, stall = list(self.story.blows), self.story.stall
        harm = self.story.harm
        acting = self._start("fit")
        victims = Victims(self.root, self.url, str(self.folder))
        while clock.now() - began < within_s:
            with _environment(self.environment()):
                self._strike(blows, victims, acting, clock.now() - began)
            if harm is not None and clock.now() - began >= harm.at_s:
                with _environment(self.environment()):
                    harm = None if self._do_harm(harm, victims, clock.now() - began) else harm
            if stall is not None and clock.now() - began >= stall.at_s and victims.at_work:
                bad_wire.stall(self.wire, stall.for_s)
                self._tell(f"{clock.now() - began:6.2f} s  bucket hangs for {stall.for_s:.1f} s")
                stall = None
            code = acting.poll()
            if code == 0:
                return True
            if code == -signal.SIGKILL:
                acting = self._start("attach")
            elif code is not None:
                self._tell(f"the driver ended with code {code}: {self._last_words()}")
                return False
            clock.wait(_LOOK_EVERY_S)
        self._tell(f"it has not ended within {within_s:.0f} s")
        acting.kill()
        acting.wait()
        return False

    def _strike(
        self, blows: list[Blow], victims: Victims, acting: subprocess.Popen[bytes], elapsed_s: float
    ) -> None:
        if not blows or elapsed_s < blows[0].at_s:
            return
        whom = blows[0].whom
        dice = Dice(self.story.seed).stream(f"victim {len(blows)}")
        if whom == "driver":
            acting.kill()
            acting.wait()
            struck: str | None = f"the driver {acting.pid}"
        else:
            struck = victims.strike(whom, dice)
        if struck is not None:
            blows.pop(0)
            self.struck_ms.append(wall_ms())
            self._tell(f"{elapsed_s:6.2f} s  killed {struck}")

    def _do_harm(self, harm: Harm, victims: Victims, elapsed_s: float) -> bool:
        """Whether there was something to be damaged. Only what no other checkpoint shares."""
        latest = victims.newest_of(2)
        if latest is None:
            return False
        store = open_store(self.url)
        dice = Dice(self.story.seed).stream("harm")
        files = [one.key for one in store.list(latest) if one.size_bytes < saves.FROZEN_BYTES]
        files += [one.key for one in store.list(f"{keys.MANIFESTS}{latest}")]
        if not files:
            return False
        self.harmed.add(latest)
        key = dice.choice(sorted(files))
        _damage(store, key, harm.how, dice)
        struck = victims.strike("everybody", dice)
        self._tell(f"{elapsed_s:6.2f} s  {harm.how} {key}; killed {struck}")
        return True

    def _start(self, how: str) -> subprocess.Popen[bytes]:
        with (self.folder / "logs" / "driver.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603  # ourselves
                [sys.executable, "-m", _ME, "--act", how, str(self.folder)],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _last_words(self) -> str:
        said = (_read(self.folder / "logs" / "driver.log") or "").strip().splitlines()
        return said[-1] if said else "nothing was said"

    def _left_behind(self, within_s: float) -> list[str]:
        clock = SystemClock()
        give_up_at = clock.now() + within_s
        while clock.now() < give_up_at and (self._debris() or with_mark(MARK, str(self.folder))):
            clock.wait(_LOOK_BEHIND_EVERY_S)
        processes = [f"process {one}" for one in with_mark(MARK, str(self.folder))]
        return processes + self._debris()

    def _debris(self) -> list[str]:
        tmp = [str(path) for path in (self.folder / "tmp").iterdir()]
        return tmp + list(_all_below(self.root.path))

    def _tell(self, what: str) -> None:
        with (self.folder / "logs" / "story.log").open("a") as log:
            log.write(f"{what}\n")

    def clear(self) -> None:
        """Nobody stays, whatever happened."""
        mourned(with_mark(MARK, str(self.folder)))


def _damage(store: Store, key: str, how: str, dice: Stream) -> None:
    body = bytearray(store.get(key))
    if how == "delete":
        store.delete(key)
        return
    if how == "cut":
        del body[len(body) // 2 :]
    elif not body:  # there is nothing to flip
        body.append(1)
    else:
        body[int(dice.random() * len(body))] ^= 1
    store.put(key, bytes(body))


# --- inside a story ---------------------------------------------------------------------------


def serve(assignment: Assignment, *, zygotes: ZygoteKeeper) -> int:
    """The agent of a machine in a story: it is paid, it keeps its log, and is an agent."""
    folder = Path(env.lookup(MARK) or "")
    with (folder / "paid").open("a") as paid:
        paid.write(f"{assignment.token} {assignment.node} {os.getpid()}\n")
    log = (folder / "logs" / f"{assignment.token}-{assignment.node}.log").open("a")
    with log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    mines.lay("agent")
    return driver.serve(assignment, zygotes=zygotes)


def act(how: str, folder: Path) -> int:
    """The driver of a story: call `fit()`, or attach to what a killed one has begun."""
    story = msgspec.json.decode((folder / "story.json").read_bytes(), type=Story)
    result = None
    while result is None:
        try:
            result = _result(story, folder, how)
        except TransientStoreError:  # the bucket is away for too long: a user would try again, too
            how = "attach"
    (folder / "result.draft").write_text(str(result.return_value))
    (folder / "result.draft").rename(folder / "result")
    return 0


def _result(story: Story, folder: Path, how: str) -> spotfit.Result:
    stage_url = _read(folder / "url")
    try:
        if how == "attach" and stage_url:
            return spotfit.attach(stage_url).result()
    except RunNotFoundError:
        return _fit(story, folder)
    return _fit(story, folder)


def _fit(story: Story, folder: Path) -> spotfit.Result:
    storage = "s3://chaos/runs" if story.store == "s3" else str(folder / "store")
    (folder / "url").write_text(f"{storage}/{story.name}")
    return _trainer(story)(
        _JOBS[story.job],
        train_loop_config=story.config(folder),
        scaling_config=spotfit.ScalingConfig(num_workers=story.workers),
        run_config=spotfit.RunConfig(
            name=story.name,
            storage_path=storage,
            failure_config=spotfit.FailureConfig(max_failures=-1),
            checkpoint_config=spotfit.CheckpointConfig(num_to_keep=2),
        ),
        provisioner=LocalOptions(nodes=_NODES, root=str(folder / "machines"), agent=_AGENT),
    ).fit()


_JOBS: dict[Job, Callable[..., Any]] = {
    "count": jobs.count,
    "descend": jobs.descend,
    "keep": saves.keep,
    "learn": saves.learn,
}


def _trainer(story: Story) -> Callable[..., spotfit.DataParallelTrainer]:
    if story.job in ("count", "keep"):
        return spotfit.DataParallelTrainer
    from spotfit.torch import TorchTrainer

    return TorchTrainer


# --- many stories -----------------------------------------------------------------------------


class Ending(NamedTuple):
    """What happened in a story, and what is wrong with how it ended."""

    told: list[str]
    wrong: list[str]
    landed: int
    """How many blows fell while its run was active."""
    late: int
    """How many came after its end, or never."""
    lasted_s: float
    """From the start of its driver to the end of its run; 0 where it has none."""


@dataclass
class Tally:
    """How a number of stories went."""

    stories: int = 0
    wrong: int = 0
    landed: int = 0
    """Blows that fell while a run was active."""
    late: int = 0
    """Blows that came after the end, however soon they were tried: they prove nothing."""

    def __str__(self) -> str:
        late = f", {self.late} came too late" if self.late else ""
        return f"{self.stories} stories, {self.wrong} wrong; {self.landed} blows landed{late}"

    def add(self, ending: Ending) -> None:
        """One more story."""
        self.stories += 1
        self.wrong += bool(ending.wrong)
        self.landed += ending.landed
        self.late += ending.late


class Theatre:
    """Plays story after story; folders of those that went wrong are kept."""

    def __init__(self, folder: Path, *, within_s: float) -> None:
        self._folder = folder
        self._within_s = within_s
        self._expected: dict[str, str] = {}

    def play(self, story: Story, wire: str) -> Ending:
        """Let it happen, and see what has come of it; again and sooner where blows were late."""
        expected = self._result_of(story, wire)
        while True:
            ending = self._take(story, wire, expected)
            if ending.wrong or not ending.late or story.take + 1 == _TAKES:
                return ending
            story = story.sooner(ending.lasted_s)

    def _take(self, story: Story, wire: str, expected: str) -> Ending:
        folder = self._folder / str(story.seed)
        stage = Stage(story, folder, wire)
        try:
            audit = stage.play(within_s=self._within_s)
        finally:
            stage.clear()
        wrong = audit.wrong(expected, steps=story.steps)
        if torn := _read(folder / "torn"):
            wrong.append(f"what was restored is not what was saved: {torn}")
        told = (_read(folder / "logs" / "story.log") or "").splitlines()
        if not wrong:
            shutil.rmtree(folder)
        landed = sum(audit.active_at(struck_ms) for struck_ms in stage.struck_ms)
        lasted_s = max(0, (audit.ended_ms or 0) - stage.began_ms) / 1000
        late = max(0, len(story.blows) + stage.stepped_on - landed)
        return Ending(told, wrong, landed, late, lasted_s)

    def _result_of(self, story: Story, wire: str) -> str:
        if story.job in ("count", "keep"):
            return jobs.counted(story.steps)
        what = f"{story.job}-{story.strategy}"
        if what not in self._expected:
            fair = bad_wire.fair()
            calm = Story(0, story.job, "file", fair, (), strategy=story.strategy, pace_s=0.0)
            folder = self._folder / f"undisturbed-{what}"
            stage = Stage(calm, folder, wire)
            audit = stage.play(within_s=self._within_s)
            self._expected[what] = audit.result or "the undisturbed run failed"
            shutil.rmtree(folder)
        return self._expected[what]


class Teller(Protocol):
    """What a seed tells of."""

    def __call__(self, seed: int, *, torch: float) -> Story: ...


def run(
    seeds: Sequence[int],
    *,
    folder: Path,
    within_s: float = 120.0,
    torch: float = 0.1,
    teller: Teller | None = None,
) -> Tally:
    """Play the stories of these seeds, and tell of each how it went."""
    teller = teller or story_of
    theatre = Theatre(folder, within_s=within_s)
    tally = Tally()
    with wire_to_a_store() as wire:
        for seed in seeds:
            story = teller(seed, torch=torch)
            ending = theatre.play(story, wire)
            tally.add(ending)
            _say(story, ending, folder / str(seed))
    return tally


@contextlib.contextmanager
def wire_to_a_store() -> Iterator[str]:
    """A store's address, with a wire to it that can be made bad."""
    with subprocess.Popen(  # noqa: S603  # our own module
        [sys.executable, "-m", bad_wire.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def _say(story: Story, ending: Ending, folder: Path) -> None:
    verdict = f"WRONG, everything is in {folder}" if ending.wrong else "fine"
    late = f", {ending.late} too late" if ending.late else ""
    blows = f"{ending.landed} of {len(story.blows)} blows and {len(story.mines)} mines landed{late}"
    sys.stdout.write(f"seed {story.seed}: {verdict} ({story.job} on {story.store}, {blows})\n")
    for line in (*ending.told, *ending.wrong):
        sys.stdout.write(f"    {line}\n")
    sys.stdout.flush()


def _make_bucket(wire: str) -> None:
    bad_wire.change_weather(wire, bad_wire.fair())
    request = urllib.request.Request(f"{wire}/chaos", method="PUT")  # noqa: S310  # loopback
    urllib.request.urlopen(request).close()  # noqa: S310  # as above


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = env.everything()
    env.replace(values)
    try:
        yield
    finally:
        env.replace(before)


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Play so many stories; as many went wrong as the exit code says, 99 at most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many stories")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--torch", type=float, default=0.1, help="share of stories with torch")
    parser.add_argument("--saves", action="store_true", help="stories of a Checkpointer's saves")
    parser.add_argument("--within", type=float, default=120.0, help="seconds a story may take")
    parser.add_argument("--folder", type=Path, help="where stories that went wrong are kept")
    parser.add_argument("--act", nargs=2, help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    if told.act:
        return act(told.act[0], Path(told.act[1]))
    folder = told.folder or Path(tempfile.mkdtemp(prefix="spotfit-chaos-"))
    seeds = range(told.start, told.start + told.seeds)
    teller = story_of_saves if told.saves else story_of
    tally = run(seeds, folder=folder, within_s=told.within, torch=told.torch, teller=teller)
    if not tally.wrong:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(json.dumps(asdict(tally)) + "\n")
    return min(tally.wrong, 99)


def _all_below(folder: Path) -> Iterator[str]:
    """What is there while others may be removing it."""
    for path, folders, files in os.walk(folder):
        yield from (str(Path(path, name)) for name in (*folders, *files))


if __name__ == "__main__":
    sys.exit(main())
