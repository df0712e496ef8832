"""`python -m spotfit.cli`: the `spotfit` command where scripts are not on the path."""

from __future__ import annotations

from spotfit.cli.main import main

if __name__ == "__main__":
    main()
