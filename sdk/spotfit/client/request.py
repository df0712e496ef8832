"""What a trainer was given, gathered in one place; and what of it the machines need to know."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from spotfit.client.config import RunConfig
from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId
from spotfit.frameworks.config import BackendConfig, hooks_of
from spotfit.host import env
from spotfit.model.config import ScalingConfig
from spotfit.model.data import DataConfig
from spotfit.model.spec import Keep, Limits, RunSpec, Tempo, ValidationSpec, Vigil
from spotfit.model.validation import ValidationConfig
from spotfit.provision.options import chosen
from spotfit.provision.profile import provisioner_of_profile, resolve
from spotfit.ship.fingerprint import code_of, plain


@dataclass(frozen=True)
class FitRequest:
    """One call of `fit()`, before anything was checked."""

    fn: Callable[..., Any]
    config: dict[str, Any] | None
    scaling: ScalingConfig
    run: RunConfig
    framework: str
    framework_options: dict[str, Any]
    backend_config: BackendConfig
    provisioner: Any = None
    datasets: dict[str, Any] = field(default_factory=dict)
    dataset_config: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig | None = None
    tempo: Tempo = field(default_factory=Tempo)

    def chosen_provisioner(self) -> tuple[str, dict[str, Any]]:
        """Name and options, with those that the environment and `spotfit.toml` say.

        See `provision.profile`. Raises `ConfigError` for whatever of it cannot be meant.
        """
        name, options = self.named_provisioner()
        return name, resolve(name, options)

    def named_provisioner(self) -> tuple[str, dict[str, Any]]:
        """From the argument, else SPOTFIT_PROVISIONER, the profile, or 'local'.

        Text may carry options as a query: 'local?nodes=2'; of an object counts what is not its
        default. Raises `ConfigError`.
        """
        given = default_provisioner() if self.provisioner is None else self.provisioner
        if isinstance(given, str):
            return parse_provisioner(given)
        name = getattr(given, "provisioner", None)
        is_object = dataclasses.is_dataclass(given) and not isinstance(given, type)
        if isinstance(name, str) and is_object:
            return name, chosen(given)
        raise ConfigError(
            f"provisioner={given!r} is neither a name nor an options object.",
            do="Give a name like 'local', a text like 'local?nodes=2', or its options object.",
        )

    def spec(
        self, *, run_id: RunId, name: str, storage_url: str, luggage: dict[str, Any]
    ) -> RunSpec:
        """The part that goes into the journal."""
        provisioner, options = self.chosen_provisioner()
        hooks = hooks_of(self.backend_config)
        failure, keep, logging = (
            self.run.failure_config,
            self.run.checkpoint_config,
            self.run.logging_config,
        )
        assert failure is not None
        assert keep is not None
        assert logging is not None
        return RunSpec(
            run_id=run_id,
            name=name,
            fit_id=self.fingerprint(),
            workers_min=self.scaling.min_workers,
            workers_max=self.scaling.max_workers,
            elastic=self.scaling.elasticity_enabled,
            resize_every_s=self.scaling.elastic_resize_monitor_interval_s,
            resources_per_worker=self.scaling.worker_resources,
            limits=Limits(
                worker=failure.max_failures,
                platform=failure.controller_failure_limit,
                preemption=failure.max_preemption_failures,
                preemption_grace_s=failure.preemption_grace_s,
            ),
            keep=Keep(
                keep.num_to_keep,
                keep.checkpoint_score_attribute,
                "min" if keep.checkpoint_score_order == "min" else "max",
            ),
            framework=self.framework,
            framework_options=self.framework_options,
            luggage=luggage,
            provisioner=provisioner,
            provisioner_options=options,
            storage_url=storage_url,
            relax_collectives=failure.relax_collectives_on_preemption,
            collective_timeout_s=env.value(env.COLLECTIVE_TIMEOUT_S) or None,
            collective_warn_s=env.value(env.COLLECTIVE_WARN_S),
            log_level=logging.log_level,
            callbacks=any(one.listens() for one in self.run.callbacks or ()),
            hooks=hooks is not None,
            share_devices=hooks is not None and hooks.share_cuda_visible_devices,
            vigil=_vigil(),
            tempo=self.tempo,
            validation=None if self.validation is None else _spec_of(self.validation),
        )

    def fingerprint(self) -> str:
        """Equal for the same script run again: of the function's code, its config and its width."""
        parts = [
            code_of(self.fn),
            plain(self.config),
            plain(dataclasses.asdict(self.scaling)),
            self.framework,
            plain(self.framework_options),
            plain([_kind_of(self.backend_config), getattr(self.backend_config, "__dict__", {})]),
            plain(self.run.worker_runtime_env),
        ]
        if self.validation is not None:
            task = dataclasses.asdict(self.validation.task_config)
            parts += [code_of(self.validation.fn), plain(task)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def default_provisioner() -> str:
    """What SPOTFIT_PROVISIONER says, else the profile; else this machine."""
    return env.value(env.PROVISIONER) or provisioner_of_profile() or "local"


def _spec_of(validation: ValidationConfig) -> ValidationSpec:
    return ValidationSpec(
        validation.own_machine, validation.resources, validation.task_config.timeout_s
    )


def _vigil() -> Vigil:
    """When workers are taken to hang, as the environment says."""
    return Vigil(
        silent_s=env.value(env.HEALTH_TIMEOUT_S),
        hang_s=env.value(env.HANG_CONFIRM_S) if env.value(env.DETECT_HANGS) else 0.0,
        hang_ends=env.value(env.HANG_ACTION) == "fail",
        start_s=env.value(env.START_TIMEOUT_S),
    )


def parse_provisioner(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of 'local?nodes=2' or 'sim://aws_batch?seed=1'. Raises `ConfigError`."""
    address, _, query = text.partition("?")
    name, _, cloud = address.partition("://")
    pairs = parse_qsl(query, keep_blank_values=True)
    options: dict[str, Any] = {key: _number_or_text(value) for key, value in pairs}
    if cloud:
        options["cloud"] = cloud.rstrip("/")
    if not name:
        raise ConfigError(
            f"provisioner={text!r} names none.", do="Write 'local', or 'local?nodes=2'."
        )
    return name, options


def _number_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _kind_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
