"""Write Grafana's boards, or with `--check` compare them and exit with 1 if one is not current."""

import json
import sys
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.builders.common import VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, GridPos

from docs._boards.boards import BOARDS, Board, Panel
from docs._boards.promql import rows_of

FOLDER: Final = Path(__file__).resolve().parents[2] / "ops" / "monitoring" / "boards"
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT: Final = 8
COLUMNS: Final = 24


def board_json(board: Board) -> str:
    """The board as Grafana imports it. Raises `UnknownName` for a query of a metric or label that does not exist."""
    built = (
        dashboard.Dashboard(f"Headwater: {board.title}")
        .uid(f"headwater-{board.name}")
        .description(board.purpose)
        .tags(["headwater"])
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(dashboard.DashboardLink("Headwater").tags(["headwater"]).as_dropdown(True).keep_time(True))
    )
    x = y = 0
    for panel in board.panels:
        width = COLUMNS if panel.wide else COLUMNS // 2
        if x + width > COLUMNS:
            x, y = 0, y + HEIGHT
        built.with_panel(_panel(panel, GridPos(h=HEIGHT, w=width, x=x, y=y)))
        x += width
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(built.build())), indent=1) + "\n"


def _panel(panel: Panel, place: GridPos) -> timeseries.Panel:
    rows = dict.fromkeys(row for query in panel.queries for row in rows_of(query.expr))
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description("\n\n".join(f"{row.name}: {row.help}" for row in rows))
        .datasource(SOURCE)
        .unit(panel.unit)
        .min(0)
        .grid_pos(place)
        .fill_opacity(8)
        .show_points(VisibilityMode.NEVER)
        .legend(
            VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    for number, query in enumerate(panel.queries):
        made.with_target(
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + number))
            .datasource(SOURCE)
            .expr(query.expr.replace("$r", "$__rate_interval"))
            .legend_format(query.legend)
            .range()
        )
    return made


def main() -> int:
    """Exit status."""
    made = {f"{board.name}.json": board_json(board) for board in BOARDS}
    present = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    stale = sorted(name for name in made.keys() | present.keys() if made.get(name) != present.get(name))
    if "--check" in sys.argv:
        for name in stale:
            print(f"ops/monitoring/boards/{name} is not current: run `make docs-reference`", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name in present.keys() - made.keys():
        (FOLDER / name).unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)
    print(f"ops/monitoring/boards: {len(stale)} of {len(made)} boards changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
