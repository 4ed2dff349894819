"""Finds the cheapest values that separate one part of a graph from another."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

UNLIMITED = 1 << 60
Spot = tuple[ir.Value | None, bool]  # a value, before or after the point where it may be cut; None: the source or the sink
Room = dict[Spot, dict[Spot, int]]  # how much more may flow from one place to another
SOURCE: Spot = (None, False)
SINK: Spot = (None, True)


class Uncuttable(Exception):
    """No values that may be chosen separate a graph: what depends on `source` is needed before and after the cut."""

    def __init__(self, source: ir.Value):
        super().__init__(source.name)
        self.source = source


def minimum_cut(
    reads: Mapping[ir.Node, Sequence[ir.Value]],
    sources: Iterable[ir.Value],
    late: Iterable[ir.Value],
    sinks: Iterable[ir.Value],
    cost: Callable[[ir.Value], int | None],
) -> list[ir.Value]:
    """Return the values of the least total cost that lie on all paths from the sources to the sinks: the last such values.

    The least cost is the largest flow (Ford and Fulkerson 1956), which is found along shortest paths (Edmonds and Karp 1972).

    Args:
        reads: the values that each node of the graph depends on; the nodes in their order.
        sources: values where paths begin, all before the cut.
        late: values that exist after the cut only, so that what depends on them is computed there.
        sinks: values where paths end.
        cost: what a value costs; None if it may not be chosen.

    Returns:
        The values: sources first, then in the order in which the graph computes them.

    Raises:
        Uncuttable: no values that may be chosen separate the sinks from the sources.
    """
    ordered, after = dict.fromkeys(sources), {*late}
    room: Room = defaultdict(dict)

    def connect(begin: Spot, end: Spot, most: int = UNLIMITED) -> None:
        room[begin][end] = most
        room[end].setdefault(begin, 0)

    for value in ordered:
        connect(SOURCE, (value, False))
    for node, values in reads.items():
        if not after.isdisjoint(values):
            after.update(node.outputs)
        read = [value for value in values if value in ordered]
        for output in node.outputs if read else ():
            ordered[output] = None
            for value in read:
                connect((value, True), (output, False))
                connect((output, False), (value, False))  # nothing before the cut reads what is computed after it
    for value in ordered:
        limit = cost(value)
        connect((value, False), (value, True), UNLIMITED if limit is None else limit)
        if value in after:
            connect((value, False), SINK)
    for value in sinks:
        if value in ordered:
            connect((value, True), SINK)
    while path := _path(room):
        flow = min(room[begin][end] for begin, end in path)
        if flow > UNLIMITED // 2:
            source = path[0][1][0]
            assert source is not None
            raise Uncuttable(source)
        for begin, end in path:
            room[begin][end] -= flow
            room[end][begin] += flow
    behind = _reaching(room)
    return [value for value in ordered if (value, False) not in behind and (value, True) in behind]


def _path(room: Room) -> list[tuple[Spot, Spot]]:
    """Return the steps of a shortest path with room from the source to the sink, or nothing."""
    came, waiting = {SOURCE: SOURCE}, deque([SOURCE])
    while waiting and SINK not in came:
        place = waiting.popleft()
        for following, left in room[place].items():
            if left > 0 and following not in came:
                came[following] = place
                waiting.append(following)
    steps, place = list[tuple[Spot, Spot]](), SINK
    while came.get(place, place) != place:
        steps.append((came[place], place))
        place = came[place]
    return steps[::-1]


def _reaching(room: Room) -> set[Spot]:
    """Return the places with room on a path to the sink."""
    found, waiting = {SINK}, [SINK]
    while waiting:
        place = waiting.pop()
        for before in room[place]:
            if before not in found and room[before][place] > 0:
                found.add(before)
                waiting.append(before)
    return found
