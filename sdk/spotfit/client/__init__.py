"""The front door: trainers, `fit()`, and the handle of a run.

This room knows no cloud and no simulator; it finds both by name, as any third party's.
"""
