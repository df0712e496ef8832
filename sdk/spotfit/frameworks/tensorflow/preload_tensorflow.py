"""Imports tensorflow for workers with the legacy Keras; for the fork server only.

TensorFlow decides at its import which Keras `from tensorflow.keras import ...` gives. This module
sets TF_USE_LEGACY_KERAS before, unless it is set: the only module whose import changes a variable.
"""

from __future__ import annotations

from spotfit.host import env

env.set_defaults({"TF_USE_LEGACY_KERAS": "1"})

import tensorflow as tensorflow  # noqa: E402
