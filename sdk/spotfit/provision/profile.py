"""What is chosen about a backend, and where: in one order, from the call down to `spotfit.toml`.

1. what the call says: `provisioner="aws_batch?queues=spot"`, or an options object, of which counts
   what is not as it would be anyway;
2. the environment: `SPOTFIT_AWS_BATCH_QUEUES=spot`;
3. the profile: `[aws_batch] queues = ["spot"]` in the nearest `spotfit.toml`, from the working
   directory upwards, or in the file that SPOTFIT_CONFIG names. `[profiles.big.aws_batch]` is used
   where SPOTFIT_PROFILE is `big`, and says only what differs. What `terraform output -json` writes
   into a `spotfit.json` beside it counts, too; the `.toml` wins;
4. the default of the option.

Machines never read any of it: what was chosen here is in the run's spec.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean
from spotfit.host import env, plugins
from spotfit.provision.options import chosen, parse_options
from spotfit.provision.registry import GROUP

_NAMES = ("spotfit.toml", "spotfit.json")
_PROFILES = "profiles"


def resolve(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All that somebody chose about the backend `name`, as plain data, checked.

    Raises `ConfigError` for an unknown backend or profile, a file that cannot be read, and every
    option that cannot be meant.
    """
    kind = plugins.load(GROUP, name)
    options = getattr(kind, "Options", None)
    if options is None:
        return {**from_profile(name), **given}
    known = [field.name for field in dataclasses.fields(options)]
    told = {**from_profile(name), **_from_environment(name, known), **given}
    return chosen(parse_options(options, told))


def provisioner_of_profile() -> str | None:
    """The backend that the profile names, if it does: `provisioner = "aws_batch"`."""
    found = _tables().get("provisioner")
    return str(found) if found else None


def from_profile(name: str) -> dict[str, Any]:
    """What the profile says of that backend."""
    found = _tables().get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} = {found!r} in a profile is no table of options.")
    return dict(found)


def _from_environment(name: str, known: Iterable[str]) -> dict[str, str]:
    told = {option: env.lookup(f"SPOTFIT_{name}_{option}".upper()) for option in known}
    return {option: text for option, text in told.items() if text}


def _tables() -> dict[str, Any]:
    """Everything the files say, with the chosen profile laid over it."""
    merged: dict[str, Any] = {}
    for path in reversed(_files()):
        _lay_over(merged, _read(path))
    profiles = merged.pop(_PROFILES, {})
    profile = env.value(env.PROFILE)
    if not profile:
        return merged
    if profile not in profiles:
        raise ConfigError(
            f"There is no profile {profile!r}. {did_you_mean(profile, profiles)}".rstrip(),
            do=f"Correct SPOTFIT_PROFILE, or write [{_PROFILES}.{profile}] into spotfit.toml.",
        )
    _lay_over(merged, profiles[profile])
    return merged


def _files() -> list[Path]:
    """The one that counts most comes first."""
    named = env.value(env.CONFIG)
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"SPOTFIT_CONFIG names {named}, which is no file.")
        return [Path(named)]
    for folder in (here := Path.cwd(), *here.parents):
        found = [folder / name for name in _NAMES if (folder / name).is_file()]
        if found:
            return found
    return []


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".json":
            return _outputs(msgspec.json.decode(path.read_bytes()))
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError) as wrong:
        raise ConfigError(f"{path} cannot be read: {wrong}.", do="Correct or remove it.") from wrong


def _outputs(told: Any) -> dict[str, Any]:
    """Plain JSON, or what `terraform output -json` writes: a `value` for every name."""
    if not isinstance(told, dict):
        raise msgspec.DecodeError("it holds no object")
    return {
        name: found["value"] if isinstance(found, dict) and "value" in found else found
        for name, found in told.items()
    }


def _lay_over(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, Mapping):
            under = below.get(name)
            below[name] = dict(under) if isinstance(under, Mapping) else {}
            _lay_over(below[name], value)
        else:
            below[name] = value
