"""Finds the cheapest values that separate one part of a graph from another."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

UNLIMITED = 1 << 60
Place = tuple[ir.Value | None, bool]  # a value before or after it is computed; None: the source, or the sink


class Uncuttable(Exception):  # noqa: N818  # callers explain it to the user
    """Some path has no value that may be cut."""

    def __init__(self, source: ir.Value, sink: ir.Value):
        super().__init__(f"{source.name} leads to {sink.name}")
        self.source, self.sink = source, sink


SOURCE: Place = (None, False)
SINK: Place = (None, True)


def minimum_cut(
    graph: ir.Graph,
    reads: Mapping[ir.Node, Sequence[ir.Value]],
    sources: Iterable[ir.Value],
    late: Iterable[ir.Value],
    sinks: Iterable[ir.Value],
    cost: Callable[[ir.Value], int | None],
) -> list[ir.Value]:
    """Return the values of the least total cost that lie on all paths from the sources to the sinks: the last such values.

    The sum is found as the largest flow (Ford and Fulkerson 1956), along shortest paths (Edmonds and Karp 1972).

    Args:
        graph: the graph.
        reads: the values that each node depends on.
        sources: values where paths begin, all before the cut.
        late: values that exist after the cut only, so that what depends on them is computed there.
        sinks: values where paths end.
        cost: what a value costs; None if it may not be chosen.

    Returns:
        The values in the order in which the graph computes them.

    Raises:
        Uncuttable: no values that may be chosen separate them.
    """
    room: dict[Place, dict[Place, int]] = defaultdict(dict)

    def connect(begin: Place, end: Place, most: int) -> None:
        room[begin][end] = most
        room[end].setdefault(begin, 0)

    reached, after = {*sources}, {*late}
    for value in reached:
        connect(SOURCE, (value, False), UNLIMITED)
    ordered = [*graph.inputs]
    for node in graph:
        ordered += node.outputs
        read = [value for value in reads[node] if value in reached]
        if not after.isdisjoint(reads[node]):
            after.update(node.outputs)
        for output in node.outputs if read else ():
            reached.add(output)
            for value in read:
                connect((value, True), (output, False), UNLIMITED)
                connect((output, False), (value, False), UNLIMITED)  # a value before the cut is computed from such values
    for value in reached:
        limit = cost(value)
        connect((value, False), (value, True), UNLIMITED if limit is None else limit)
        if value in after:
            connect((value, False), SINK, UNLIMITED)
    for value in sinks:
        if value in reached:
            connect((value, True), SINK, UNLIMITED)
    while path := _path(room):
        flow = min(room[begin][end] for begin, end in path)
        if flow >= UNLIMITED // 2:
            first, last = path[0][1][0], path[-1][0][0]
            assert first is not None and last is not None
            raise Uncuttable(first, last)
        for begin, end in path:
            room[begin][end] -= flow
            room[end][begin] += flow
    behind = _reaching(room)
    return [value for value in ordered if value in reached and (value, False) not in behind and (value, True) in behind]


def _path(room: Mapping[Place, Mapping[Place, int]]) -> list[tuple[Place, Place]]:
    """Return the steps of a shortest path from the source to the sink that has room, or nothing."""
    came: dict[Place, Place] = {SOURCE: SOURCE}
    waiting = deque([SOURCE])
    while waiting and SINK not in came:
        place = waiting.popleft()
        for following, left in room[place].items():
            if left > 0 and following not in came:
                came[following] = place
                waiting.append(following)
    steps, place = list[tuple[Place, Place]](), SINK
    while place in came and place != SOURCE:
        steps.append((came[place], place))
        place = came[place]
    return steps[::-1]


def _reaching(room: Mapping[Place, Mapping[Place, int]]) -> set[Place]:
    """Return the places from which there is still room on a path to the sink."""
    found, waiting = {SINK}, [SINK]
    while waiting:
        place = waiting.pop()
        for before in room[place]:
            if before not in found and room[before][place] > 0:
                found.add(before)
                waiting.append(before)
    return found
