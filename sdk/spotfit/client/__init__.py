"""The driver's API: trainers, `fit()`, `submit()`, `attach()` and the handle of a run.

It must not know specific clouds or the simulator; provisioners are found by name.
"""
