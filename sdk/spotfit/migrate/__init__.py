"""The mover: rewrites what a Ray Train script imports, and says what it had to leave.

It knows source text and our public names; it starts nothing, and never imports Ray.
"""
