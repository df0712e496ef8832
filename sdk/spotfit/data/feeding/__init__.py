"""Processes that transform slices of datasets for the workers: beside them and on other machines.

A feeder executes tasks that the order of an epoch names, see `spotfit.data.loading.slices`. It
holds no state that matters: its death changes neither a byte nor the order of what the workers
train on.
"""
