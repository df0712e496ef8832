"""The keys of this user's runs, kept on this machine: whoever holds one may command the run."""

from __future__ import annotations

from pathlib import Path

from spotfit.core.ids import RunId, parse_name
from spotfit.host import dice, env
from spotfit.ship.sign import RunKey


class Keyring:
    """One file a run below `directory`, readable by its owner only."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or Path(env.value(env.HOME_DIR)).expanduser() / "keys"

    def find(self, run_id: RunId) -> RunKey | None:
        """The run's key: from SPOTFIT_RUN_SECRET, else from the file; None if neither has it."""
        told = env.value(env.RUN_SECRET)
        if told:
            return RunKey.from_text(told, run_id)
        file = self._file(run_id)
        return RunKey.from_text(file.read_text().strip(), run_id) if file.is_file() else None

    def make(self, run_id: RunId) -> RunKey:
        """A new key for that run, written down before anybody uses it."""
        key = RunKey(dice.new_secret_bytes(), run_id)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self._file(run_id)
        file.touch(mode=0o600)
        file.write_text(key.to_text())
        return key

    def _file(self, run_id: RunId) -> Path:
        return self._directory / parse_name(run_id, what="The run's id")
