"""`fit()` for a run that is already active: follow it if it is the same run, else refuse.

A run is the same if function, configuration, scaling and all uploaded code are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from spotfit.client.preflight import PreflightResult
from spotfit.client.request import FitRequest
from spotfit.code.code_bundle import CodeBundleRef, compute_code_fingerprint
from spotfit.core.errors import RunActiveError
from spotfit.host import log
from spotfit.model.spec import RunSpec
from spotfit.model.view import View
from spotfit.store.api import Store

# Fields of `RunSpec` that do not identify a run, and the settings they come from. The active run
# keeps the values with which it was started.
_CHANGEABLE_SETTINGS = {
    "failure_limits": "failure_config",
    "relax_collectives": "failure_config",
    "retention": "checkpoint_config",
    "log_level": "logging_config",
    "has_callbacks": "callbacks",
    "validation": "validation_config",
    "provisioner": "provisioner",
    "provisioner_options": "provisioner",
}


def rejoin_run(
    request: FitRequest, view: View, preflight: PreflightResult, *, objects: Mapping[str, object]
) -> RunSpec:
    """Return the spec of the active run if the request describes the same run.

    Raises `RunActiveError` if the function, its configuration or any uploaded code has changed:
    otherwise the user would mistake the result of the old code for that of the new code.
    """
    spec = view.spec
    # Two steps: `fit_id` covers the function itself, the bundle fingerprint all modules and files.
    if spec.fit_id != request.fingerprint():
        raise _run_conflict(
            spec, preflight.store, "with a different function, train_loop_config or scaling"
        )
    current = compute_code_fingerprint(
        request.fn, request.config, runtime_env=preflight.runtime_env, objects=objects
    )
    if changed := msgspec.convert(spec.code_bundle, CodeBundleRef).list_changes(current):
        reason = f"with older code: {', '.join(changed)} changed after its start"
        raise _run_conflict(spec, preflight.store, reason)
    # Not an error: such a setting does not change what is trained, and the run need not restart.
    ignored = _changed_settings(request, spec)
    log.warning(
        "run.rejoined",
        url=preflight.store.url,
        text="this run is already active; fit() follows it",
        **({"ignored": ", ".join(ignored)} if ignored else {}),
    )
    return spec


def _run_conflict(spec: RunSpec, store: Store, difference: str) -> RunActiveError:
    return RunActiveError(
        f"A run named {spec.name!r} is active in {store.url}, {difference}.",
        do=f"Follow it with spotfit.attach({store.url!r}); or cancel it with RunHandle.cancel() "
        "and call fit() again, which continues from its latest checkpoint; or choose another "
        "RunConfig(name=...).",
    )


def _changed_settings(request: FitRequest, spec: RunSpec) -> list[str]:
    """Return the names of changed settings that have no effect on the active run."""
    # With the identity of the active run: only what the request determines is compared.
    requested = request.build_spec(
        run_id=spec.run_id,
        name=spec.name,
        storage_url=spec.storage_url,
        code_bundle=spec.code_bundle,
    )
    # Compared as JSON data: the active spec was read from JSON, where tuples became lists.
    active_data, requested_data = (
        msgspec.json.decode(msgspec.json.encode(each)) for each in (spec, requested)
    )
    return sorted(
        {
            setting
            for field, setting in _CHANGEABLE_SETTINGS.items()
            if active_data[field] != requested_data[field]
        }
    )
