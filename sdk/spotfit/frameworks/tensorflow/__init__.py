"""The framework of TensorFlow: the cluster of all ranks, from which strategies form their group.

Importing this package does not import tensorflow.
"""
