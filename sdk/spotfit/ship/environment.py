"""What `worker_runtime_env` may say, parsed at the door with all its mistakes at once."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NewType, Self

import msgspec

from spotfit.core.errors import ConfigError, ConfigErrors, SpotfitError
from spotfit.core.nearest import did_you_mean

if TYPE_CHECKING:
    from packaging.requirements import Requirement

BundleId = NewType("BundleId", str)
"""The SHA-256 of a bundle that lies in the run's store already."""

Code = Path | BundleId

_BUNDLE_ID = re.compile(r"sha256:([0-9a-f]{64})")
_INDEX_OPTIONS = (
    "--index-url",
    "--extra-index-url",
    "--find-links",
    "--no-index",
    "--pre",
    "--prefer-binary",
    "--only-binary",
    "--no-binary",
    "--trusted-host",
    "-i ",
    "-f ",
)


class RuntimeEnv(msgspec.Struct, frozen=True):
    """What the caller wants around the function, with paths of the caller's machine."""

    env_vars: dict[str, str] = {}
    working_dir: Code | None = None
    py_modules: tuple[Code, ...] = ()
    pip: tuple[str, ...] = ()

    @classmethod
    def parse(cls, wanted: Mapping[str, Any] | None) -> Self:
        """From a `worker_runtime_env` dictionary.

        `working_dir` and `py_modules` name local paths, or 'sha256:…' of what the run's store has
        already; `pip` is a list of requirements or the path of a requirements file. A requirement
        that leaves the version open is pinned to the one installed here, if it allows that: a
        machine that comes late gets what the first one got. Raises `ConfigError`.
        """
        mistakes: list[SpotfitError] = []
        fields: dict[str, Any] = {}
        for key, value in (wanted or {}).items():
            try:
                fields[key] = _reader(key)(value)
            except ConfigErrors as several:
                mistakes += several.errors
            except ConfigError as mistake:
                mistakes.append(mistake)
        _raise_all(mistakes)
        return cls(**fields)

    def brings(self) -> frozenset[str]:
        """The distributions that `pip` names, for `pins.foresee`."""
        return _named(self.pip)


class ShippedEnv(msgspec.Struct, frozen=True):
    """What a node prepares: `RuntimeEnv` once its code lies in the run's store."""

    env_vars: dict[str, str] = {}
    working_dir: str | None = None
    """The bundle to work in; it is importable, too."""
    py_modules: tuple[str, ...] = ()
    """Bundles that are importable."""
    pip: tuple[str, ...] = ()

    @property
    def pip_id(self) -> str:
        """Equal requirements, in any order, have equal ids."""
        return hashlib.sha256("\n".join(sorted(self.pip)).encode()).hexdigest()

    def brings(self) -> frozenset[str]:
        """The distributions that `pip` names, for `pins.compare`."""
        return _named(self.pip)


def _reader(key: str) -> Callable[[Any], Any]:
    if key not in _READERS:
        raise ConfigError(
            f"worker_runtime_env has no key {key!r}. {did_you_mean(str(key), _READERS)}",
            do="Files to leave out of working_dir are listed in a .spotfitignore."
            if key == "excludes"
            else "Correct or remove it.",
        )
    return _READERS[key]


def _env_vars(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise _wrong("env_vars", value, "a dictionary of strings")
    mistakes = [_judged_variable(name, text) for name, text in value.items()]
    _raise_all(mistake for mistake in mistakes if mistake is not None)
    return dict(value)


def _judged_variable(name: Any, text: Any) -> ConfigError | None:
    if not isinstance(name, str) or not name or set(name) & {"=", "\0"}:
        return ConfigError(f"env_vars: {name!r} cannot be the name of an environment variable.")
    if not isinstance(text, str) or "\0" in text:
        return ConfigError(
            f"env_vars[{name!r}] must be a string, not {text!r}.", do=f"Write {str(text)!r}."
        )
    return None


def _working_dir(value: Any) -> Code:
    code = _code("working_dir", value)
    if isinstance(code, Path) and not code.is_dir():
        raise _absent("working_dir", code, "directory")
    return code


def _py_modules(value: Any) -> tuple[Code, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong("py_modules", value, "a list of paths or modules")
    return _each(value, _py_module)


def _py_module(value: Any) -> Code:
    code = _place_of(value) if isinstance(value, ModuleType) else _code("py_modules", value)
    if not isinstance(code, Path):
        return code
    if not code.exists():
        raise _absent("py_modules", code, "package directory or .py file")
    importable = code.is_dir() or code.suffix == ".py"
    if not importable or not Path(os.path.abspath(code)).stem.isidentifier():  # noqa: PTH100
        raise ConfigError(
            f"py_modules: {str(code)!r} cannot be imported by its name.",
            do="Name the package's own directory (the one with __init__.py) or a .py file.",
        )
    return code


def _place_of(module: ModuleType) -> Path:
    """Where a module object came from: its directory if it is a package."""
    for place in [*getattr(module, "__path__", ()), module.__dict__.get("__file__")]:
        if place:
            return Path(place)
    raise ConfigError(
        f"py_modules: module {module.__name__!r} has no files.",
        do="It is built in, or was made at run time: leave it out.",
    )


def _pip(value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, os.PathLike)):
        path = Path(value).expanduser()
        if not path.is_file():
            raise _absent("pip", path, "requirements file (one requirement goes into a list)")
        value = _unfolded(path.read_text(encoding="utf-8"))
    if not isinstance(value, (list, tuple)):
        raise _wrong("pip", value, "a list of requirements or the path of a requirements file")
    return _each(value, _pip_line)


def _unfolded(text: str) -> list[str]:
    """The lines of a requirements file, without comments, blanks and line ends in between."""
    lines = (re.sub(r"(^|\s)#.*", "", line) for line in text.replace("\\\n", " ").splitlines())
    return [line.strip() for line in lines if line.strip()]


def _pip_line(line: Any) -> str:
    if not isinstance(line, str):
        raise _wrong("each item of pip", line, "a string such as 'einops==0.8.0'")
    if line.startswith(_INDEX_OPTIONS):
        return line
    if line.startswith(("-", ".", "/")):
        raise ConfigError(
            f"pip: {line!r} points to a file that the machines do not have.",
            do="Write the requirements themselves; code of yours goes into py_modules.",
        )
    return _pinned(line)


def _pinned(line: str) -> str:
    wanted = _requirement(line)
    if wanted.url or any(each.operator in {"==", "==="} for each in wanted.specifier):
        return line
    here = _version_here(wanted.name)
    if here is None or not wanted.specifier.contains(here, prereleases=True):
        return line
    name, _, marker = str(wanted).partition(";")
    name = name.removesuffix(str(wanted.specifier)).strip()
    return f"{name}=={here}" + (f" ;{marker}" if marker else "")


def _version_here(name: str) -> str | None:
    """The released version installed here; a checkout's own versions are in no index."""
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(metadata.version(name))
    except (metadata.PackageNotFoundError, InvalidVersion):
        return None
    return None if version.is_devrelease else version.public


def _named(pip: Iterable[str]) -> frozenset[str]:
    lines = [line for line in pip if not line.startswith("-")]
    return frozenset(_canonical(_requirement(line).name) for line in lines)


def _requirement(line: str) -> Requirement:
    # Imported here: it costs 40 ms, and most runs bring no packages.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(line.partition(" --")[0])
    except InvalidRequirement as wrong:
        reason = str(wrong).splitlines()[0]
        raise ConfigError(
            f"pip: {line!r} is no requirement: {reason}", do="Write it as pip would read it."
        ) from wrong


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _code(what: str, value: Any) -> Code:
    if not isinstance(value, (str, os.PathLike)):
        raise _wrong(what, value, "a path")
    text = os.fspath(value)
    if match := _BUNDLE_ID.fullmatch(str(text)):
        return BundleId(match[1])
    return Path(str(text)).expanduser()


def _each(values: Iterable[Any], read: Callable[[Any], Any]) -> tuple[Any, ...]:
    good, mistakes = [], []
    for value in values:
        try:
            good.append(read(value))
        except ConfigError as mistake:
            mistakes.append(mistake)
    _raise_all(mistakes)
    return tuple(good)


def _wrong(what: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{what} must be {wanted}, not {value!r}.", do=f"Pass {wanted}.")


def _absent(what: str, path: Path, kind: str) -> ConfigError:
    return ConfigError(
        f"{what}: there is no {kind} {str(path)!r} (seen from {_here()}).",
        do="Correct the path, or give it in full.",
    )


def _here() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "a working directory that was removed"


def _raise_all(mistakes: Iterable[SpotfitError]) -> None:
    match list(mistakes):
        case []:
            return
        case [one]:
            raise one
        case several:
            raise ConfigErrors(several)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "env_vars": _env_vars,
    "working_dir": _working_dir,
    "py_modules": _py_modules,
    "pip": _pip,
}
