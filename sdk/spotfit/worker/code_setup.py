"""Makes the user's code importable in a worker or sidecar process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from spotfit.code.code_bundle import CodeBundlePayload, CodeBundleRef, fetch_code_bundle
from spotfit.code.environment_setup import prepare_runtime_env
from spotfit.fork_server import child_setup
from spotfit.host import env
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store


def open_code_bundle(
    bundle_ref: dict[str, Any], key: RunKey, store: Store, scratch: str
) -> CodeBundlePayload:
    """Read the code bundle from the node's copy or the store, verify and decrypt it.

    `bundle_ref` is a `CodeBundleRef` as plain JSON; `scratch` is the node's scratch directory, ''
    for no local copy. Raises `IntegrityError` if the bundle was modified, `ShippingError` if
    another version of spotfit packed it, and `StoreError` if it cannot be read.
    """
    reference = msgspec.convert(bundle_ref, CodeBundleRef)
    copy = Path(scratch) / "code_bundle" / reference.sha256
    # The copy is verified like the object in the bucket: other processes can write the disk.
    envelope = (
        copy.read_bytes()
        if scratch and copy.exists()
        else fetch_code_bundle(reference, store=store)
    )
    return CodeBundlePayload.open(envelope, key=key)


def activate_code_bundle(
    bundle_ref: dict[str, Any], key: RunKey, store: Store, scratch: str, run_name: str | None = None
) -> CodeBundlePayload:
    """Open the code bundle and set the environment variables and `sys.path` of this process.

    Packages of its runtime environment are installed first if the node lacks them. With `run_name`
    it also enters the working directory of the workers: `<scratch>/work/<run_name>`, or the one of
    the runtime environment; None keeps the current one. Arguments as in `open_code_bundle`. Raises
    `ShippingError`, `IntegrityError`, and the errors of pip.
    """
    payload = open_code_bundle(bundle_ref, key=key, store=store, scratch=scratch)
    scratch_dir = Path(scratch or ".")
    prepared = prepare_runtime_env(payload.runtime_env, store=store, scratch_dir=scratch_dir)
    env.update(prepared.env_vars)
    # In front: the user's modules hide installed packages of the same name, as in a script.
    sys.path[:0] = prepared.sys_path
    if run_name is not None:
        # All workers of the run on this node share it. Not the scratch directory itself: relative
        # paths of user code must not meet our files.
        shared = scratch_dir / "work" / run_name
        if not prepared.cwd:
            shared.mkdir(parents=True, exist_ok=True)
        os.chdir(prepared.cwd or shared)
        child_setup.shorten_socket_paths()
    return payload
