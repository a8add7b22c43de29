"""A layered drawing of a dependency graph as SVG: an importer is above what it imports."""

from collections.abc import Iterable, Mapping
from html import escape

BOX_WIDTH, BOX_HEIGHT = 190, 40
GAP_X, GAP_Y = 16, 56
MARGIN = 24
HEAD = 60
SWEEPS = 24

COLOURS = {
    "schemas": "#dfe7f5",
    "events": "#d9efe3",
    "router": "#fbe8cf",
    "engines": "#f3dcea",
    "actors": "#e3dff7",
    "ops": "#e8e8e4",
}


def same_cycle(one: str, other: str, cycle_of: Mapping[str, int]) -> bool:
    """Are both the same, or in one cycle?"""
    return one == other or (one in cycle_of and cycle_of[one] == cycle_of.get(other))


def layers_of(imports: Mapping[str, Iterable[str]], cycle_of: Mapping[str, int]) -> list[list[str]]:
    """Names by layer, top first: each name lies below all that import it. Members of a cycle share a layer."""
    level: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in level:
            members = [one for one in imports if same_cycle(name, one, cycle_of)]
            below = [one for member in members for one in imports[member] if one not in members]
            highest = max((1 + height(one) for one in below), default=0)
            level.update(dict.fromkeys(members, highest))
        return level[name]

    for name in imports:
        height(name)
    found: list[list[str]] = [[] for _ in range(max(level.values(), default=0) + 1)]
    for name in sorted(imports):
        found[-1 - level[name]].append(name)
    return found


def reduced(imports: Mapping[str, Iterable[str]], cycle_of: Mapping[str, int]) -> dict[str, set[str]]:
    """Edges without those that follow from others (transitive reduction); edges within cycles all stay."""
    forward = {
        name: {one for one in imported if not same_cycle(name, one, cycle_of)}
        for name, imported in imports.items()
    }
    reach: dict[str, set[str]] = {}

    def below(name: str) -> set[str]:
        if name not in reach:
            reach[name] = set()
            reach[name] = set().union(forward[name], *(below(one) for one in forward[name]))
        return reach[name]

    return {
        name: {
            one
            for one in imported
            if one not in forward[name] or not any(one in below(other) for other in forward[name] - {one})
        }
        for name, imported in imports.items()
    }


def _ordered(layers: list[list[str]], edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The same layers, each sorted by the mean position of its neighbours, so that few edges cross."""
    neighbours: dict[str, set[str]] = {name: set(edges[name]) for name in edges}
    for name, imported in edges.items():
        for one in imported:
            neighbours[one].add(name)
    place = {name: (at + 0.5) / len(layer) for layer in layers for at, name in enumerate(layer)}
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 else reversed(layers):

            def wanted(name: str) -> float:
                near = [place[one] for one in neighbours[name]]
                return sum(near) / len(near) if near else place[name]

            layer.sort(key=lambda name: (wanted(name), name))
            for at, name in enumerate(layer):
                place[name] = (at + 0.5) / len(layer)
    return layers


def svg_of(
    imports: Mapping[str, Iterable[str]],
    notes: Mapping[str, str],
    cycle_of: Mapping[str, int],
    marked: set[str],
    title: str,
) -> str:
    """An SVG document: a box for each name with its note, red if in a cycle (its number by name), thick if marked."""
    edges = reduced(imports, cycle_of)
    layers = _ordered(layers_of(imports, cycle_of), edges)
    width = 2 * MARGIN + max(len(layer) for layer in layers) * (BOX_WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + HEAD + len(layers) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    place: dict[str, tuple[float, float]] = {}
    for row, layer in enumerate(layers):
        left = (width - len(layer) * (BOX_WIDTH + GAP_X) + GAP_X) / 2
        for column, name in enumerate(layer):
            place[name] = (left + column * (BOX_WIDTH + GAP_X), MARGIN + HEAD + row * (BOX_HEIGHT + GAP_Y))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif">',
        f"<title>Dependencies between packages, {escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="context-stroke"/></marker></defs>',
        f'<text x="{MARGIN}" y="{MARGIN}" font-size="13" fill="#555">an arrow points to what is imported; arrows '
        "that follow from others are left out; red: in an import cycle; thick frame: more than 15 files</text>",
    ]
    for name in sorted(edges):
        for one in sorted(edges[name]):
            parts.append(_edge(place[name], place[one], red=same_cycle(name, one, cycle_of)))
    for name, (x, y) in place.items():
        colour = COLOURS.get(name.split(".")[0], "#eeeeee")
        frame = "#c0392b" if name in cycle_of else "#666666"
        parts += [
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{colour}" '
            f'stroke="{frame}" stroke-width="{3 if name in marked else 1}"/>',
            f'<text x="{x + BOX_WIDTH / 2:.1f}" y="{y + 17:.1f}" font-size="13" text-anchor="middle" '
            f'font-weight="600">{escape(name)}</text>',
            f'<text x="{x + BOX_WIDTH / 2:.1f}" y="{y + 32:.1f}" font-size="11" text-anchor="middle" '
            f'fill="#444">{escape(notes[name])}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _edge(source: tuple[float, float], target: tuple[float, float], *, red: bool) -> str:
    """A curve from the lower edge of one box to the upper edge of another; in one layer, an arc above."""
    (x1, y1), (x2, y2) = source, target
    x1, x2 = x1 + BOX_WIDTH / 2, x2 + BOX_WIDTH / 2
    if y1 < y2:
        y1 += BOX_HEIGHT
        bend = min((y2 - y1) / 2, 120.0)
        path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
    elif y1 == y2:
        path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 - 40:.1f} {x2:.1f} {y2 - 40:.1f} {x2:.1f} {y2:.1f}"
    else:
        y2 += BOX_HEIGHT
        path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 - 40:.1f} {x2:.1f} {y2 + 40:.1f} {x2:.1f} {y2:.1f}"
    colour, thick = ("#c0392b", 1.6) if red else ("#8a8a8a", 1.0)
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thick}" marker-end="url(#tip)"/>'
