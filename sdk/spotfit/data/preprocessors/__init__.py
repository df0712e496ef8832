"""Preprocessors of datasets, with the names of `ray.data.preprocessors`.

Importing this package must not import NumPy or PyArrow; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.data.preprocessors.batch_mapper import BatchMapper as BatchMapper
    from spotfit.data.preprocessors.categorizer import Categorizer as Categorizer
    from spotfit.data.preprocessors.chain import Chain as Chain
    from spotfit.data.preprocessors.dataset_preparation import (
        preprocess_datasets as preprocess_datasets,
    )
    from spotfit.data.preprocessors.discretizers import (
        CustomKBinsDiscretizer as CustomKBinsDiscretizer,
    )
    from spotfit.data.preprocessors.discretizers import (
        UniformKBinsDiscretizer as UniformKBinsDiscretizer,
    )
    from spotfit.data.preprocessors.encoders import LabelEncoder as LabelEncoder
    from spotfit.data.preprocessors.encoders import MultiHotEncoder as MultiHotEncoder
    from spotfit.data.preprocessors.encoders import OneHotEncoder as OneHotEncoder
    from spotfit.data.preprocessors.encoders import OrdinalEncoder as OrdinalEncoder
    from spotfit.data.preprocessors.imputers import SimpleImputer as SimpleImputer
    from spotfit.data.preprocessors.power_transformer import PowerTransformer as PowerTransformer
    from spotfit.data.preprocessors.row_preprocessors import Concatenator as Concatenator
    from spotfit.data.preprocessors.row_preprocessors import Normalizer as Normalizer
    from spotfit.data.preprocessors.scalers import MaxAbsScaler as MaxAbsScaler
    from spotfit.data.preprocessors.scalers import MinMaxScaler as MinMaxScaler
    from spotfit.data.preprocessors.scalers import RobustScaler as RobustScaler
    from spotfit.data.preprocessors.scalers import StandardScaler as StandardScaler
    from spotfit.data.preprocessors.stored_preprocessor import (
        checkpoint_metadata as checkpoint_metadata,
    )
    from spotfit.data.preprocessors.stored_preprocessor import (
        preprocessor_of_metadata as preprocessor_of_metadata,
    )
    from spotfit.data.preprocessors.torchvision_preprocessor import (
        TorchVisionPreprocessor as TorchVisionPreprocessor,
    )
    from spotfit.data.preprocessors.vectorizers import CountVectorizer as CountVectorizer
    from spotfit.data.preprocessors.vectorizers import FeatureHasher as FeatureHasher
    from spotfit.data.preprocessors.vectorizers import HashingVectorizer as HashingVectorizer
    from spotfit.data.preprocessors.vectorizers import Tokenizer as Tokenizer

_NAMES = {
    "batch_mapper": ("BatchMapper",),
    "categorizer": ("Categorizer",),
    "chain": ("Chain",),
    "dataset_preparation": ("preprocess_datasets",),
    "discretizers": ("CustomKBinsDiscretizer", "UniformKBinsDiscretizer"),
    "encoders": ("LabelEncoder", "MultiHotEncoder", "OneHotEncoder", "OrdinalEncoder"),
    "imputers": ("SimpleImputer",),
    "power_transformer": ("PowerTransformer",),
    "row_preprocessors": ("Concatenator", "Normalizer"),
    "scalers": ("MaxAbsScaler", "MinMaxScaler", "RobustScaler", "StandardScaler"),
    "stored_preprocessor": ("checkpoint_metadata", "preprocessor_of_metadata"),
    "torchvision_preprocessor": ("TorchVisionPreprocessor",),
    "vectorizers": ("CountVectorizer", "FeatureHasher", "HashingVectorizer", "Tokenizer"),
}
_MODULES = {
    name: f"spotfit.data.preprocessors.{module}"
    for module, names in _NAMES.items()
    for name in names
}

__all__ = [
    "BatchMapper",
    "Categorizer",
    "Chain",
    "Concatenator",
    "CountVectorizer",
    "CustomKBinsDiscretizer",
    "FeatureHasher",
    "HashingVectorizer",
    "LabelEncoder",
    "MaxAbsScaler",
    "MinMaxScaler",
    "MultiHotEncoder",
    "Normalizer",
    "OneHotEncoder",
    "OrdinalEncoder",
    "PowerTransformer",
    "RobustScaler",
    "SimpleImputer",
    "StandardScaler",
    "Tokenizer",
    "TorchVisionPreprocessor",
    "UniformKBinsDiscretizer",
    "checkpoint_metadata",
    "preprocess_datasets",
    "preprocessor_of_metadata",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
