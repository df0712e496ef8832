"""The waist: what a cloud must be able to do, in four verbs.

This room knows no cloud by more than its name, and nothing of buckets, journals or policies.
"""
