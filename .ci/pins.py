"""Print constraints.txt: the exact version of everything that is installed beside us."""

from importlib.metadata import distributions

NOT_PINNED = {"spotfit", "pip"}
HEAD = """\
# Exact versions of everything, as they work together on Python 3.11. Written by `make pins`.
# torch stands without its build: pip takes the build that the index at hand offers.\
"""


def main() -> None:
    print(HEAD)
    pins = {d.name.lower().replace("_", "-"): d.version.partition("+")[0] for d in distributions()}
    for name in sorted(pins.keys() - NOT_PINNED):
        print(f"{name}=={pins[name]}")


if __name__ == "__main__":
    main()
