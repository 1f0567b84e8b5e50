"""Tables for people: what the rows are about stands on the left, what is said of them in columns beside it."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]], align: str = "right") -> str:
    """Cells as they are, a number in a text included; `align` is of all columns but the first."""
    from tabulate import tabulate

    columns = ("left", *[align] * (len(head) - 1))
    return str(tabulate(rows, head, "simple", disable_numparse=True, colalign=columns if rows else None))
