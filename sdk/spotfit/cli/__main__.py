"""`python -m spotfit.cli`: the `spotfit` command, for environments without scripts on the PATH."""

from __future__ import annotations

from spotfit.cli.main import main

if __name__ == "__main__":
    main()
