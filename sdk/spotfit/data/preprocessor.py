"""`Preprocessor`, at the address that it has in Ray."""

from __future__ import annotations

from spotfit.data.preprocessors.preprocessor_base import (
    Preprocessor as Preprocessor,
)
from spotfit.data.preprocessors.preprocessor_base import (
    PreprocessorNotFittedException as PreprocessorNotFittedException,
)
