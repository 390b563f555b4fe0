"""Which step several shadows can all be at. Pure.

A span is (history, first, last): a shadow can be at each of these steps. Histories are numbered in order of time;
steps of different histories have nothing in common.
"""

from collections.abc import Sequence

Span = tuple[int, ...]
Position = tuple[int, int]
"""History and step."""


def newest_position(shadows: Sequence[Sequence[Span]]) -> Position | None:
    """The newest that each shadow has in one of its spans; None: there is none, or no shadow."""
    if not shadows:
        return None
    # The newest common position is the last of somebody's span.
    ends = {(history, last) for spans in shadows for history, _, last in spans}
    return max((end for end in ends if all(any(_has(span, end) for span in spans) for spans in shadows)), default=None)


def _has(span: Span, position: Position) -> bool:
    history, first, last = span
    return history == position[0] and first <= position[1] <= last
