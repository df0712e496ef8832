"""`python -m spotfit.migrate script.py`: move a Ray Train script over."""

from __future__ import annotations

from spotfit.migrate.command import main

if __name__ == "__main__":
    main()
