"""A second `fit()` under the name of a run that goes on: the same again, or another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from spotfit.client.preflight import Cleared
from spotfit.client.request import FitRequest
from spotfit.core.errors import RunActiveError
from spotfit.host import log
from spotfit.model.spec import RunSpec
from spotfit.model.view import View
from spotfit.ship.luggage import Luggage, carried
from spotfit.store.api import Store

_SETTINGS = {
    "limits": "failure_config",
    "relax_collectives": "failure_config",
    "keep": "checkpoint_config",
    "log_level": "logging_config",
    "callbacks": "callbacks",
    "validation": "validation_config",
    "provisioner": "provisioner",
    "provisioner_options": "provisioner",
}
"""What may differ without making it another run: these hold as they were when it began."""


def join(
    request: FitRequest, view: View, cleared: Cleared, *, objects: Mapping[str, object]
) -> RunSpec:
    """The spec of the run that goes on, if it is this very one.

    Raises `RunActiveError` where the function, its config, or any code it carries along has
    changed since: whoever changed it would take the old code's result for the new one's.
    """
    spec = view.spec
    assert spec is not None
    if spec.fit_id != request.fingerprint():
        raise _another(spec, cleared.store, "with another function or config")
    now = carried(request.fn, request.config, runtime_env=cleared.runtime_env, objects=objects)
    if changed := msgspec.convert(spec.luggage, Luggage).changed(now):
        how = f"with the code it began with, and since then {', '.join(changed)} changed"
        raise _another(spec, cleared.store, how)
    ignored = {"ignored": ", ".join(kept)} if (kept := _ignored(request, spec)) else {}
    what = "it goes on as it was started"
    log.warning("run.joined", url=cleared.store.url, what=what, **ignored)
    return spec


def _another(spec: RunSpec, store: Store, how: str) -> RunActiveError:
    return RunActiveError(
        f"A run named {spec.name!r} is going on in {store.url}, {how}.",
        do=f"Follow it with spotfit.attach({store.url!r}); or end it with its cancel() and call "
        "fit() again, which continues from its latest checkpoint; or choose another "
        "RunConfig(name=...).",
    )


def _ignored(request: FitRequest, spec: RunSpec) -> list[str]:
    """The settings that were changed since it began, in vain."""
    asked = request.spec(
        run_id=spec.run_id, name=spec.name, storage_url=spec.storage_url, luggage=spec.luggage
    )
    was, is_now = _plain(spec), _plain(asked)
    return sorted({told for field, told in _SETTINGS.items() if was[field] != is_now[field]})


def _plain(spec: RunSpec) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(spec))
    return plain
