"""What XGBoost and LightGBM share: segments of rounds, reports of models, rows of datasets.

This package imports neither library. It is not public: its names are exported by
`spotfit.xgboost` and `spotfit.lightgbm`.
"""
