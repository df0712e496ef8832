"""Clouds: one folder each, which turns our four verbs into a cloud's words and back.

This package sees only `core`, `host`, `model` and `provision`, and no folder sees another.
"""
