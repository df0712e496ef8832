"""`python -m spotfit.worker <socket> <parent>`: a worker in an interpreter of its own."""

from __future__ import annotations

import sys

from spotfit.worker import birth


def begin(arguments: list[str]) -> None:
    """Do what the zygote does for its children, then work."""
    talk, parent, what = int(arguments[0]), int(arguments[1]), arguments[2]
    birth.separate(parent)
    birth.whole_lines()
    birth.enter(what, talk)


if __name__ == "__main__":
    begin(sys.argv[1:])
