"""Graphs as pictures: operations, tensors, and the kernels around what they fuse.

Within a kernel, what planning made of the user's operations has a box of its own.

``draw`` uses graphviz where it is installed. Else operations stand below each other in the order in
which they run, inputs to their left and outputs to their right; what is not read by the next
operation goes down on the right.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from kernel_api.errors import KernelApiError
from kernel_api.graph._enums import data_type, element_type
from kernel_api.graph._node import Node
from kernel_api.graph._tensor import Tensor

_FONT = "Helvetica, Arial, sans-serif"
_INK, _PALE = "#1f2933", "#7b8794"
#: Colours of boxes, by kind of step: fill and line.
_COLOURS = {
    "kernel": ("#e8f1fb", "#2f6fb2"),
    "torch": ("#fdf3e1", "#c98a1b"),
    "view": ("#f1f3f5", "#9aa5b1"),
}
_SECONDS_FOR_GRAPHVIZ = 20

# XML has no place for most control characters.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def draw(graph: Any, plan: Any = None) -> str:
    """SVG of a graph; with a plan, boxes around the nodes of each of its steps."""
    drawn = _drawn(graph, plan)
    if shutil.which("dot") is not None:
        found = _by_graphviz(_dot_text(graph.name, drawn))
        if found is not None:
            return found
    return _Picture(graph.name, drawn).svg()


# What is drawn -------------------------------------------------------------------------------


class _Box(NamedTuple):
    """Nodes that run together; without a title, no box is drawn around them."""

    title: str
    kind: str
    nodes: list[Node]


class _Drawn(NamedTuple):
    """What there is to draw.

    Attributes:
        boxes: In the order that they run.
        merged: By id of a node, names of the user's nodes that it was made of, if it has another.
        made: By id of a node that planning put in the place of the user's, what it is made of.
    """

    boxes: list[_Box]
    merged: dict[int, list[str]]
    made: dict[int, list[str]]

    @property
    def nodes(self) -> list[Node]:
        return [node for box in self.boxes for node in box.nodes]

    def runs(self, nodes: Iterable[Node]) -> Iterator[tuple[list[str], list[Node]]]:
        """Neighbours that are made of the same, with the title of the box around them; the others,
        which have none, with an empty one."""
        for title, run in itertools.groupby(nodes, lambda node: self.made.get(id(node), [])):
            yield title, list(run)


def _drawn(graph: Any, plan: Any) -> _Drawn:
    if plan is None:
        return _Drawn([_Box("", "view", _sorted(graph.nodes))], {}, {})
    boxes, shown = [], dict[int, Node]()
    for step in plan.steps:
        # What several kernels compute is drawn in the first of them.
        nodes = [node for node in _sorted(step.nodes) if id(node) not in shown]
        shown.update((id(node), node) for node in nodes)
        boxes.append(_Box(_clean(step.title), step.kind, nodes))
    merged, left = _merged(graph.nodes, list(shown.values()))
    own = {(node.name, node.op) for node in graph.nodes}
    planned = [node for node in shown.values() if (node.name, node.op) not in own]
    return _Drawn([*boxes, _Box("", "view", left)], merged, _made(planned, merged))


def _made(nodes: list[Node], merged: dict[int, list[str]]) -> dict[int, list[str]]:
    """What planning made of which nodes of the user's, as lines; these are not in ``merged``
    any more. What serves another of them, ``name::...``, is made of the same."""
    of = {node.name: merged.pop(id(node), []) or [_base(node)] for node in nodes}
    return {id(node): _wrapped("made of ", of.get(_base(node), of[node.name])) for node in nodes}


def _base(node: Node) -> str:
    return node.name.rsplit("::", 1)[0]


def _merged(nodes: Iterable[Node], shown: list[Node]) -> tuple[dict[int, list[str]], list[Node]]:
    """Nodes that a plan computes as part of others, by id of that; and those that it leaves out,
    because nothing comes of them."""
    writer = {id(tensor): node for node in shown for tensor in node.writes}
    into: dict[int, Node] = {}  # what a node of the graph is part of, by the id of what it writes
    merged: dict[int, list[str]] = {}
    left: list[Node] = []
    ids, names = {id(node) for node in shown}, {(node.name, node.op) for node in shown}
    for node in reversed(_sorted(nodes)):
        found = [writer.get(id(t)) or into.get(id(t)) for t in node.writes]
        target = next((one for one in found if one is not None), None)
        if id(node) in ids:
            target = node
        elif target is None:
            left.insert(0, node)
            continue
        elif (node.name, node.op) not in names:
            merged.setdefault(id(target), []).insert(0, node.name)
        for tensor in node.reads:
            into.setdefault(id(tensor), target)
    return merged, left


def _sorted(nodes: Iterable[Node]) -> list[Node]:
    """The nodes behind those that they read of; circles, as they came."""
    waiting = list(nodes)
    written = {id(tensor) for node in waiting for tensor in node.writes}
    found: list[Node] = []
    while waiting:
        ready = (n for n in waiting if not any(id(tensor) in written for tensor in n.reads))
        node = next(ready, waiting[0])
        waiting.remove(node)
        written -= {id(tensor) for tensor in node.writes}
        found.append(node)
    return found


def _lines(node: Node, merged: dict[int, list[str]]) -> list[str]:
    """What stands in a node: its name, its operation, and numbers among its arguments."""
    lines = [_clean(node.name)]
    if node.op != node.name.split(".")[0]:
        lines.append(_clean(node.op))
    for key, given in node.inputs.items():
        for tensor in given if isinstance(given, tuple) else (given,):
            if tensor.is_constant:
                lines.append(f"{_clean(key)} = {tensor.value:.6g}")
    if node.body is not None:
        lines += _wrapped("with ", (one.op for one in node.body.nodes))
    return lines + _wrapped("of ", merged.get(id(node), ()))


def _wrapped(first: str, names: Iterable[str]) -> list[str]:
    joined = ", ".join(map(_clean, names))
    return textwrap.wrap(first + joined, 44) if joined else []


def _inputs(node: Node) -> list[Tensor]:
    """The caller's tensors that it reads, each once."""
    found = {id(t): t for t in node.reads if t.producer is None and not t.is_constant}
    return list(found.values())


def _described(tensor: Tensor) -> str:
    """Element type and dims."""
    try:
        kind = element_type(tensor.data_type).short
    except KernelApiError:
        kind = "" if tensor.data_type is data_type.NOT_SET else tensor.data_type.name
    return f"{kind} {'×'.join(map(str, tensor.dim))}".strip()


def _clean(text: str) -> str:
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", str(text))


# With graphviz -------------------------------------------------------------------------------


def _by_graphviz(text: str) -> str | None:
    """SVG that ``dot`` makes of its text; None if it does not."""
    try:
        done = subprocess.run(
            ["dot", "-Tsvg"],
            input=text.encode(),
            capture_output=True,
            check=True,
            timeout=_SECONDS_FOR_GRAPHVIZ,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    svg = done.stdout.decode(errors="replace")
    # The prologue names a document type, which pages that the picture is put into must not have.
    return svg[svg.index("<svg") :] if "<svg" in svg else None


def _dot_text(name: str, drawn: _Drawn) -> str:
    lines = [
        f"digraph {_quoted(_clean(name) or 'graph')} {{",
        f'node [shape=box style="filled,rounded" fillcolor=white fontname={_quoted(_FONT)} '
        "fontsize=12];",
        f"edge [fontname={_quoted(_FONT)} fontsize=10 color={_quoted(_PALE)}];",
    ]
    for i, box in enumerate(drawn.boxes):
        if box.title:
            fill, line = _COLOURS[box.kind]
            lines += [
                f"subgraph cluster_{i} {{",
                f'label={_quoted(box.title)}; labeljust=l; style="filled,rounded"; fontsize=11;',
                f"fillcolor={_quoted(fill)}; color={_quoted(line)}; fontname={_quoted(_FONT)};",
            ]
        for j, (title, run) in enumerate(drawn.runs(box.nodes)):
            lines += [
                f"subgraph cluster_{i}_{j} {{",
                f'label={_quoted(*title)}; labeljust=l; style="dashed,rounded"; fontsize=11;',
                f"color={_quoted(_PALE)}; fontname={_quoted(_FONT)};",
            ] * bool(title)
            for node in run:
                lines.append(f"n{id(node)} [label={_quoted(*_lines(node, drawn.merged))}];")
            lines += ["}"] * bool(title)
        lines += ["}"] * bool(box.title)
    nodes = drawn.nodes
    shown: set[int] = set()
    for node in nodes:
        for tensor in _inputs(node):
            if id(tensor) not in shown:
                shown.add(id(tensor))
                lines.append(_dot_pill(tensor))
            lines.append(f"t{id(tensor)} -> n{id(node)};")
        for tensor in node.writes:
            if not tensor.is_virtual:
                lines += [_dot_pill(tensor), f"n{id(node)} -> t{id(tensor)};"]
    writers = {id(tensor): node for node in nodes for tensor in node.writes}
    for node in nodes:
        for tensor in {id(tensor): tensor for tensor in node.reads}.values():
            if id(tensor) in writers:
                lines.append(
                    f"n{id(writers[id(tensor)])} -> n{id(node)} "
                    f"[label={_quoted(_described(tensor))}];"
                )
    return "\n".join([*lines, "}"])


def _dot_pill(tensor: Tensor) -> str:
    label = _quoted(_clean(str(tensor)), _described(tensor))
    return f"t{id(tensor)} [shape=ellipse style=filled label={label}];"


def _quoted(*lines: str) -> str:
    # dot reads entities in labels, and backslashes as escapes.
    escaped = (
        line.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;").replace("\n", " ")
        for line in lines
    )
    return '"' + "\\n".join(escaped) + '"'


# Without graphviz ----------------------------------------------------------------------------

#: Pixels.
_CHARACTER, _LINE = 6.7, 16
_PILL, _GAP, _MARGIN = 38, 34, 16
_SLOT, _BRANCH, _PADDING = 20, 20, 8


@dataclass
class _Row:
    """A node and what is beside it.

    Attributes:
        exits: Tensors that leave to the right: outputs, and those that later rows read.
        entries: Tensors of earlier rows than the last that come in from the right.
        straight: Tensors that go down to the next row.
        title: Of the box around what planning made, if the first row of that.
        ends: Whether it is the last row of that.
    """

    node: Node
    lines: list[str]
    inputs: list[Tensor]
    exits: list[Tensor] = field(default_factory=list)
    entries: list[Tensor] = field(default_factory=list)
    straight: list[Tensor] = field(default_factory=list)
    title: list[str] = field(default_factory=list)
    ends: bool = False
    top: float = 0.0

    @property
    def height(self) -> float:
        right = sum(map(_slot, self.exits)) + len(self.entries) * _SLOT
        return max(len(self.lines) * _LINE + 14, len(self.inputs) * (_PILL + 6), right)

    @property
    def title_height(self) -> float:
        return len(self.title) * _LINE + 6 if self.title else 0.0

    @property
    def middle(self) -> float:
        return self.top + self.height / 2

    def rights(self) -> Iterator[tuple[Tensor, float]]:
        """Heights of what leaves to the right, and then of what comes in."""
        y = self.top
        for tensor in self.exits:
            yield tensor, y + _slot(tensor) / 2
            y += _slot(tensor)
        for tensor in self.entries:
            yield tensor, y + _SLOT / 2
            y += _SLOT


def _slot(tensor: Tensor) -> float:
    return _SLOT if tensor.is_virtual else _PILL + 6


class _Picture:
    """Columns from left to right: inputs, nodes within boxes, lines that go down, outputs."""

    def __init__(self, name: str, drawn: _Drawn) -> None:
        self._name = _clean(name) or "graph"
        self._boxes = drawn.boxes
        self._rows = [_Row(node, _lines(node, drawn.merged), _inputs(node)) for node in drawn.nodes]
        self._row_of = {id(t): i for i, r in enumerate(self._rows) for t in r.node.writes}
        self._entitle(drawn)
        self._connect()
        self._lay()
        self._place()
        self._parts: list[str] = []

    def _entitle(self, drawn: _Drawn) -> None:
        rows = iter(self._rows)
        for box in self._boxes:
            for title, run in drawn.runs(box.nodes):
                of_run = [next(rows) for _ in run]
                of_run[0].title, of_run[-1].ends = title, bool(title)

    def _connect(self) -> None:
        for i, row in enumerate(self._rows):
            row.exits = [tensor for tensor in row.node.writes if not tensor.is_virtual]
            read = {id(t): t for t in row.node.reads if id(t) in self._row_of}
            for tensor in read.values():
                source = self._rows[self._row_of[id(tensor)]]
                if self._row_of[id(tensor)] == i - 1 and len(source.straight) < 2:
                    source.straight.append(tensor)
                else:
                    row.entries.append(tensor)
        for row in self._rows:
            for tensor in row.entries:
                source = self._rows[self._row_of[id(tensor)]]
                if not any(tensor is one for one in source.exits):
                    source.exits.append(tensor)

    def _lay(self) -> None:
        """Give what goes down on the right a lane: within its box if it does not leave that."""
        spans: dict[int, tuple[int, int]] = {}
        for i, row in enumerate(self._rows):
            for tensor in row.entries:
                start, end = spans.get(id(tensor), (self._row_of[id(tensor)],) * 2)
                spans[id(tensor)] = min(start, i), max(end, i)
        boxes = [i for i, box in enumerate(self._boxes) for _ in box.nodes]
        self._inner = {key for key, (start, end) in spans.items() if boxes[start] == boxes[end]}
        self._lanes: dict[int, int] = {}
        for key, (start, end) in sorted(spans.items(), key=lambda one: one[1][1] - one[1][0]):
            taken = {
                lane
                for other, lane in self._lanes.items()
                if spans[other][0] <= end
                and start <= spans[other][1]
                and (other in self._inner) is (key in self._inner)
            }
            self._lanes[key] = next(lane for lane in range(len(spans)) if lane not in taken)

    def _place(self) -> None:
        rows, y = self._rows, float(_MARGIN)
        self._box_places: list[tuple[_Box, float, float]] = []
        index = 0
        for box in self._boxes:
            if not box.nodes and not box.title:
                continue
            start, y = y, y + (32 if box.title else 0)
            for row in rows[index : index + len(box.nodes)]:
                row.top = y + row.title_height
                y = row.top + row.height + _PADDING * row.ends + _GAP
            index += len(box.nodes)
            y -= _GAP if box.nodes else 0
            self._box_places.append((box, start, y + 10 - start))
            y += _GAP + 12
        self._height = max(y - _GAP, _MARGIN) + _MARGIN
        pills = [_pill_width(t) for row in rows for t in row.inputs]
        self._box_left = _MARGIN + max(pills, default=0.0) + 30
        self._node_left = self._box_left + 24
        widths = [_width(one) + 20 for row in rows for one in (*row.lines, *row.title)]
        self._node_width = max([70.0, *widths])
        self._inner_left, inner_end = self._lanes_from(
            self._node_left + self._node_width, inner=True
        )
        # Boxes hold their titles, and what is written beside lines from node to node.
        middle = self._node_left + self._node_width / 2
        ends = [self._box_left + 20 + _width(box.title) for box in self._boxes if box.title]
        ends += [middle + 40 + _width(_described(t)) for row in rows for t in row.straight]
        self._box_width = max([inner_end, *ends]) + 12 - self._box_left
        right = self._box_left + self._box_width
        self._outer_left, outer_end = self._lanes_from(right, inner=False)
        self._pill_left = outer_end + 24
        outputs = [_pill_width(t) for row in rows for t in row.exits if not t.is_virtual]
        self._width = max(self._pill_left + max(outputs, default=0.0), right) + _MARGIN

    def _lanes_from(self, left: float, *, inner: bool) -> tuple[float, float]:
        """Where the first lane is, behind the labels of what goes there; and where the last is."""
        own = {k: lane for k, lane in self._lanes.items() if (k in self._inner) is inner}
        labels = [_described(t) for row in self._rows for t in row.exits if id(t) in own]
        start = left + max([0.0, *(_width(label) + 16 for label in labels)])
        return start, start + max(own.values(), default=0) * _BRANCH

    def _lane(self, tensor: Tensor) -> float:
        start = self._inner_left if id(tensor) in self._inner else self._outer_left
        return start + self._lanes.get(id(tensor), 0) * _BRANCH

    def svg(self) -> str:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width:.0f}" '
            f'height="{self._height:.0f}" viewBox="0 0 {self._width:.0f} {self._height:.0f}" '
            f'font-family="{_FONT}" font-size="12" role="img">',
            f"<title>{escape(self._name)}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8Z" fill="{_PALE}"/>'
            "</marker></defs>",
        ]
        for box, top, height in self._box_places:
            self._draw_box(box, top, height)
        self._draw_made()
        for i, row in enumerate(self._rows):
            self._draw_straight(row, self._rows[i + 1] if i + 1 < len(self._rows) else row)
            self._draw_right(row)
        for row in self._rows:
            self._draw_node(row)
            self._draw_inputs(row)
        for box, top, _ in self._box_places:
            self._draw_title(box, top)
        for row in self._rows:
            self._draw_title_of_made(row)
        return "".join([*self._parts, "</svg>"])

    def _draw_box(self, box: _Box, top: float, height: float) -> None:
        if not box.title:
            return
        fill, line = _COLOURS[box.kind]
        dashes = "" if box.kind == "kernel" else ' stroke-dasharray="5 3"'
        self._rectangle(
            self._box_left, top, self._box_width, height, f'fill="{fill}" stroke="{line}"{dashes}'
        )

    def _draw_title(self, box: _Box, top: float) -> None:
        """Over lines, which end where the letters are."""
        if box.title:
            fill, line = _COLOURS[box.kind]
            look = f'fill="{line}" font-size="11" paint-order="stroke" stroke="{fill}"'
            self._text(self._box_left + 10, top + 16, box.title, look + ' stroke-width="4"')

    def _draw_made(self) -> None:
        """Boxes around what planning made."""
        left, width = self._node_left - _PADDING, self._node_width + 2 * _PADDING
        top = 0.0
        for row in self._rows:
            top = row.top - row.title_height if row.title else top
            if row.ends:
                height = row.top + row.height + _PADDING - top
                look = f'fill="none" stroke="{_PALE}" stroke-dasharray="5 3"'
                self._rectangle(left, top, width, height, look)

    def _draw_title_of_made(self, row: _Row) -> None:
        """Over lines, as titles of kernels are."""
        look = f'fill="{_PALE}" font-size="11" paint-order="stroke" stroke="white"'
        for i, line in enumerate(row.title):
            y = row.top - row.title_height + (i + 1) * _LINE - 2
            self._text(self._node_left, y, line, look + ' stroke-width="3"')

    def _draw_node(self, row: _Row) -> None:
        self._rectangle(
            self._node_left, row.top, self._node_width, row.height, f'fill="white" stroke="{_INK}"'
        )
        y = row.middle - (len(row.lines) - 1) * _LINE / 2 + 4
        for i, line in enumerate(row.lines):
            look = 'font-weight="bold"' if i == 0 else f'font-size="11" fill="{_PALE}"'
            middle = self._node_left + self._node_width / 2
            self._text(middle, y + i * _LINE, line, f'text-anchor="middle" {look}')

    def _draw_inputs(self, row: _Row) -> None:
        y = row.middle - len(row.inputs) * (_PILL + 6) / 2 + 3
        for tensor in row.inputs:
            width = _pill_width(tensor)
            left = self._box_left - 30 - width
            self._pill(tensor, left, y, width)
            self._arrow((left + width, y + _PILL / 2), (self._node_left, y + _PILL / 2))
            y += _PILL + 6

    def _draw_straight(self, row: _Row, below: _Row) -> None:
        count = len(row.straight)
        for k, tensor in enumerate(row.straight):
            x = self._node_left + self._node_width / 2 + (k - (count - 1) / 2) * 24
            self._arrow((x, row.top + row.height), (x, below.top))
            # Behind the border of a box, if there is one in between.
            bottom = row.top + row.height
            y = bottom + (20 if below.top - bottom <= _GAP else 28)
            anchor, away = ("end", -6) if k < count - 1 else ("start", 6)
            self._label(x + away, y, tensor, anchor)

    def _draw_right(self, row: _Row) -> None:
        right = self._node_left + self._node_width
        for place, (tensor, y) in enumerate(row.rights()):
            lane = self._lane(tensor)
            if place >= len(row.exits):
                self._arrow((lane, y), (right, y))
                continue
            if id(tensor) in self._lanes:
                ends = [
                    there
                    for other in self._rows
                    for one, there in list(other.rights())[len(other.exits) :]
                    if one is tensor
                ]
                self._path((right, y), (lane, y))
                self._path((lane, min([y, *ends])), (lane, max([y, *ends])))
                if tensor.is_virtual:
                    box = self._box_left + self._box_width
                    left = right if id(tensor) in self._inner else box
                    self._label(left + 6, y - 4, tensor, "start")
            if not tensor.is_virtual:
                self._arrow((right, y), (self._pill_left, y))
                self._pill(tensor, self._pill_left, y - _PILL / 2, _pill_width(tensor))

    # Shapes ------------------------------------------------------------------------------

    def _pill(self, tensor: Tensor, left: float, top: float, width: float) -> None:
        self._rectangle(left, top, width, _PILL, f'fill="white" stroke="{_PALE}"', _PILL / 2)
        middle = left + width / 2
        self._text(middle, top + 16, _clean(str(tensor)), 'text-anchor="middle"')
        self._text(
            middle,
            top + 30,
            _described(tensor),
            f'text-anchor="middle" font-size="11" fill="{_PALE}"',
        )

    def _label(self, x: float, y: float, tensor: Tensor, anchor: str) -> None:
        self._text(
            x, y, _described(tensor), f'text-anchor="{anchor}" font-size="11" fill="{_PALE}"'
        )

    def _rectangle(
        self, left: float, top: float, width: float, height: float, look: str, round_: float = 6
    ) -> None:
        self._parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'rx="{round_:.0f}" {look}/>'
        )

    def _text(self, x: float, y: float, words: str, look: str = "") -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>')

    def _arrow(self, *places: tuple[float, float]) -> None:
        self._path(*places, look=' marker-end="url(#end)"')

    def _path(self, *places: tuple[float, float], look: str = "") -> None:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        self._parts.append(f'<path d="M{path}" fill="none" stroke="{_PALE}"{look}/>')


def _width(text: str) -> float:
    return len(text) * _CHARACTER


def _pill_width(tensor: Tensor) -> float:
    return max(_width(str(tensor)), _width(_described(tensor))) + 28
