"""Keepsakes: directories saved by many ranks, committed by one journal entry.

This room does not decide what is kept or when to save, and knows no framework.
"""
