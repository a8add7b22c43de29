"""Draw the plots, or with `--check` compare them and exit with 1 if one is not current."""

import sys

from docs._plots.data import DOCS, plots
from headwater.ops.bench.plot import svg

FOLDER = DOCS / "benchmarks" / "plots"


def main() -> int:
    """Exit status."""
    drawn = {f"{name}.svg": svg(plot) for name, plot in plots().items()}
    there = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    stale = sorted(name for name in drawn.keys() | there.keys() if drawn.get(name) != there.get(name))
    if "--check" in sys.argv:
        for name in stale:
            print(f"docs/benchmarks/plots/{name} is not current: run `make docs-plots`", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        if name in drawn:
            (FOLDER / name).write_text(drawn[name])
        else:
            (FOLDER / name).unlink()
    print(f"docs/benchmarks/plots: {len(stale)} of {len(drawn)} plots changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
