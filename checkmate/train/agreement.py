"""Which step several shadows can all be at. Pure.

A span is (history, first, last): a shadow can be at each of these steps. Histories are numbered in order of time;
steps of different histories have nothing in common.
"""

from collections.abc import Sequence

Span = tuple[int, ...]
Position = tuple[int, int]
"""History and step."""


def common_spans(shadows: Sequence[Sequence[Span]]) -> list[Span]:
    """Where all of them can be; none where there is no shadow."""
    held = list(shadows[0]) if shadows else []
    for spans in shadows[1:]:
        overlaps = [(h, max(a, c), min(b, d)) for h, a, b in held for g, c, d in spans if g == h]
        held = [span for span in overlaps if span[1] <= span[2]]
    return held


def newest_position(shadows: Sequence[Sequence[Span]]) -> Position | None:
    """The newest that all of them can be at; None: there is none, or no shadow."""
    return max(((history, last) for history, _, last in common_spans(shadows)), default=None)
