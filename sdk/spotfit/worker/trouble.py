"""What a callback or a hook raised, kept for whoever called `fit()`."""

from __future__ import annotations

import hashlib

from spotfit.core.errors import StoreError
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store
from spotfit.worker import crash


def keep(error: BaseException, store: Store, key: RunKey) -> str | None:
    """Where it lies now, pickled and sealed; None where it cannot be."""
    body = crash.pickled(error)
    if not body:
        return None
    name = keys.hook_failure(hashlib.sha256(body).hexdigest())
    try:
        store.put(name, key.seal(body, purpose=name))
    except StoreError as trouble:
        log.warning("failure.unwritten", key=name, why=trouble.what)
        return None
    return name
