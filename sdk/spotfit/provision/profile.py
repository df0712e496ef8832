"""Resolution of backend options, and opening of a provisioner by name.

Options are taken from, in order of precedence:

1. the call: `provisioner="aws_batch?queues=spot"`, or the non-default fields of an options object;
2. the environment: `SPOTFIT_AWS_BATCH_QUEUES=spot`;
3. the profile: `[aws_batch] queues = ["spot"]` in the nearest `spotfit.toml`, from the working
   directory upwards, or in the file named by SPOTFIT_CONFIG. With SPOTFIT_PROFILE=big the table
   `[profiles.big.aws_batch]` overrides it. `spotfit.json`, the output of `terraform output -json`,
   is read as well if it is in the same directory; `spotfit.toml` has precedence;
4. the default of the option.

Only the calling process reads these sources. Agents use the resolved options in the run's spec.

Parsing and checks of backend options: text and plain data become a frozen options dataclass.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector, did_you_mean
from spotfit.host import env, machine, plugins
from spotfit.provision.api import Provisioner


class ProvisionerOptions(Protocol):
    """The options object of a backend, such as `LocalOptions`: a frozen dataclass.

    Optionally it has `questions: ClassVar[Mapping[str, str]]`, the options that `spotfit init` asks
    for, each with its question.
    """

    provisioner: ClassVar[str]
    """The name of the backend."""


# --- Parsing and checks of backend options --------------------------------------------------------


OptionsT = TypeVar("OptionsT")

LOGIN_NAME: Mapping[str, str] = types.MappingProxyType({"spotfit.default": "login name"})
"""Metadata of a dataclass field: `resolve_options` replaces '' by the login name of the caller.

    user: str = field(default="", metadata=LOGIN_NAME)
"""


def parse_options(options_class: type[OptionsT], values_by_name: Mapping[str, Any]) -> OptionsT:
    """Construct `options_class`, a dataclass; strings are converted to the types of the fields.

    `values_by_name` maps option names to plain data or text: 'a,b' is a tuple of strings, '3' a
    number; nested values are written as JSON. Raises `ConfigError`, or `ConfigErrors` if several
    options are invalid.
    """
    hints = typing.get_type_hints(options_class)
    known = [field.name for field in dataclasses.fields(options_class)]  # type: ignore[arg-type]  # a dataclass
    errors = ErrorCollector()
    values: dict[str, Any] = {}
    for name, value in values_by_name.items():
        if name in known:
            parse = partial(_parse_value, options_class, name, value, hints[name])
            values[name] = errors.check(parse)
        else:
            text = f"{options_class.__name__} has no option {name!r}. {did_you_mean(name, known)}"
            errors.add(
                ConfigError(
                    text.rstrip(),
                    do=f"Correct or remove the option {name!r} in the call, the environment, or "
                    "spotfit.toml.",
                )
            )
    errors.raise_all()
    return options_class(**values)


def non_default_options(options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults, by name, as plain data.

    `options` is an instance of an options dataclass of a backend.
    """
    plain = dataclasses.asdict(options)
    # A required option has the default MISSING, which differs from every value.
    defaults = {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(options)
    }
    return {
        name: plain[name] for name, default in defaults.items() if getattr(options, name) != default
    }


def check_minimums(options: Any, *, above_zero: Sequence[str] = (), **minimums: float) -> None:
    """Check that numeric fields of the dataclass `options` are not below their minimums.

    `minimums` are given by field name, such as `nodes=1`; the fields `above_zero` must be greater
    than 0. None is accepted where it is the default. Called by options classes of backends.
    Raises `ConfigError`, or `ConfigErrors` if several fields are invalid.
    """
    rules: dict[str, tuple[float, str]] = {
        name: (minimum, f"at least {minimum}") for name, minimum in minimums.items()
    }
    # The smallest positive float is the minimum of a field that must be greater than 0.
    rules |= {name: (math.ulp(0.0), "greater than 0") for name in above_zero}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    errors = ErrorCollector()
    for name, (minimum, rule) in rules.items():
        value = getattr(options, name)
        is_unset = value is None and defaults[name] is None
        if is_unset or (value is not None and value >= minimum):
            continue
        remedy = f"Use a value that is {rule}, or omit {name}: the default is {defaults[name]!r}."
        message = f"{type(options).__name__}({name}={value!r}) must be {rule}."
        errors.add(ConfigError(message, do=remedy))
    errors.raise_all()


def _parse_value(options_class: type, name: str, value: Any, hint: Any) -> Any:
    # Not strict: values from the environment and from a query are text, also for numbers.
    try:
        return msgspec.convert(_split_text(value, hint), hint, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        type_name = hint.__name__ if isinstance(hint, type) else str(hint)
        raise ConfigError(
            f"{options_class.__name__}({name}={value!r}) is invalid: {error}.",
            do=f"Pass a value of type {type_name}.",
        ) from error


def _split_text(value: Any, hint: Any) -> Any:
    """Split text for a collection at commas, or parse it as JSON.

    Text is returned unchanged if the type accepts a plain string or no collection.
    """
    # `X | Y` and `Optional[X]` have different origins.
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    alternatives = typing.get_args(hint) if is_union else (hint,)
    origins = {typing.get_origin(alternative) or alternative for alternative in alternatives}
    accepts_collection = origins & {tuple, list, dict, frozenset} and str not in origins
    if not isinstance(value, str) or not accepts_collection:
        return value
    if value.lstrip().startswith(("[", "{")):
        return msgspec.json.decode(value)
    return [part.strip() for part in value.split(",") if part.strip()]


PROVISIONER_ENTRY_POINTS = "spotfit.provisioners"
_FILE_NAMES = ("spotfit.toml", "spotfit.json")
_PROFILES_TABLE = "profiles"


def resolve_options(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated non-default options of backend `name`, such as "aws_batch".

    They are plain data by option name. `overrides` are the options of the call; they take
    precedence over environment variables, and those over `spotfit.toml`, all read here. A backend
    without an `Options` class validates its options itself: then all are returned, and environment
    variables are not read. A backend may replace defaults that depend on the calling process by
    their values (`resolve_defaults`). Raises `ConfigError` for an unknown backend or profile, an
    unreadable file, or invalid options.
    """
    provisioner_class = plugins.load(PROVISIONER_ENTRY_POINTS, name)
    options_class = getattr(provisioner_class, "Options", None)
    # A third-party backend without an options dataclass validates its options itself.
    if options_class is None:
        return {**options_from_profile(name), **overrides}
    known = [field.name for field in dataclasses.fields(options_class)]
    variables = {option: env.lookup(f"SPOTFIT_{name}_{option}".upper()) for option in known}
    # A variable that is set to '' counts as unset.
    from_environment = {option: text for option, text in variables.items() if text}
    values = {**options_from_profile(name), **from_environment, **overrides}
    # Agents use the recorded options, so that replacements have the user of the caller as well.
    for field in dataclasses.fields(options_class):
        if field.metadata == LOGIN_NAME and not values.get(field.name):
            values[field.name] = machine.login_name()
    options = parse_options(options_class, values)
    # Optional: settings that the machines would read differently, such as the caller's region.
    resolve_defaults = getattr(provisioner_class, "resolve_defaults", None)
    return non_default_options(options if resolve_defaults is None else resolve_defaults(options))


def provisioner_from_profile() -> str | None:
    """Return the `provisioner` set in `spotfit.toml`, such as "aws_batch"; None if it is not set.

    The table of SPOTFIT_PROFILE takes precedence. Raises `ConfigError` for an unreadable file or an
    unknown profile.
    """
    name = _merge_config_files().get("provisioner")
    return str(name) if name else None


def options_from_profile(name: str) -> dict[str, Any]:
    """Return the options of backend `name` in `spotfit.toml`; empty without file or table.

    These are the table `[name]`, overridden by that of SPOTFIT_PROFILE; not validated. Raises
    `ConfigError` if it is not a table, for an unreadable file or an unknown profile.
    """
    table = _merge_config_files().get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{name} = {table!r} in the configuration file (spotfit.toml) is not a table of "
            "options.",
            do=f"Write the options under [{name}].",
        )
    return dict(table)


def _merge_config_files() -> dict[str, Any]:
    """Return the content of all configuration files, overridden by the selected profile."""
    merged: dict[str, Any] = {}
    # Lowest precedence first: later tables override earlier ones.
    for path in reversed(_find_config_files()):
        _merge_tables(merged, _read_config_file(path))
    profiles = merged.pop(_PROFILES_TABLE, {})
    profile = env.read(env.PROFILE)
    if not profile:
        return merged
    if profile not in profiles:
        raise ConfigError(
            f"SPOTFIT_PROFILE={profile}: spotfit.toml has no such profile. "
            f"{did_you_mean(profile, profiles)}".rstrip(),
            do=f"Correct SPOTFIT_PROFILE, or add [{_PROFILES_TABLE}.{profile}] to spotfit.toml.",
        )
    _merge_tables(merged, profiles[profile])
    return merged


def _find_config_files() -> list[Path]:
    """Return the configuration files, highest precedence first."""
    config_file = env.read(env.CONFIG_FILE)
    # A missing file is an error only if the user has named it.
    if config_file:
        if not Path(config_file).is_file():
            raise ConfigError(
                f"The environment variable SPOTFIT_CONFIG={config_file}: the file does not exist.",
                do="Set SPOTFIT_CONFIG to the path of a file, or unset it.",
            )
        return [Path(config_file)]
    for folder in (cwd := Path.cwd(), *cwd.parents):
        files = [folder / name for name in _FILE_NAMES if (folder / name).is_file()]
        if files:
            return files
    return []


def _read_config_file(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".json":
            return parse_terraform_outputs(path.read_bytes())
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {error}.",
            do=f"Correct the file {path.name}, or remove it.",
        ) from error


def parse_terraform_outputs(text: bytes) -> dict[str, Any]:
    """Return the values of `terraform output -json` by name; plain JSON is returned unchanged.

    Raises `msgspec.DecodeError` if the text is not a JSON object.
    """
    content = msgspec.json.decode(text)
    if not isinstance(content, dict):
        raise msgspec.DecodeError("the top level is not an object")
    return {
        name: entry["value"] if isinstance(entry, dict) and "value" in entry else entry
        for name, entry in content.items()
    }


def _merge_tables(target: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        # Tables are merged into a copy: `overrides` and other tables must not share them.
        if isinstance(value, Mapping):
            previous = target.get(name)
            target[name] = dict(previous) if isinstance(previous, Mapping) else {}
            _merge_tables(target[name], value)
        else:
            target[name] = value


def open_provisioner(name: str, options: Mapping[str, Any] | None = None) -> Provisioner:
    """Construct the provisioner `name`, such as "aws_batch", with the keyword arguments `options`.

    `options` are those of `resolve_options`; `spotfit.toml` is not read. Raises `ConfigError` for
    an unknown name or invalid options, and `MissingExtraError` if a package of the backend is not
    installed.
    """
    provisioner_class = plugins.load(PROVISIONER_ENTRY_POINTS, name)
    try:
        return cast("Provisioner", provisioner_class.with_options(**(options or {})))
    except TypeError as error:  # an unexpected keyword argument
        names = ", ".join(options or {}) or "none"
        raise ConfigError(
            f"The provisioner {name!r} does not accept the options {names}: {error}",
            do="Correct or remove them; the valid options are the parameters of "
            f"{provisioner_class.__module__}.{provisioner_class.__name__}.",
        ) from error
