"""`python -m spotfit.migrate script.py`: migrate a Ray Train script to spotfit."""

from __future__ import annotations

from spotfit.migrate.command import main

if __name__ == "__main__":
    main()
