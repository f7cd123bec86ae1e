"""Tables as plain text, the same in a terminal, a file and a log."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

# Logs have no width: at a terminal's width, or rich's default of 80, lines would break inside host names.
_UNLIMITED = 1_000_000


def draw_table(
    rows: Iterable[Sequence[object]],
    headers: Sequence[str] = (),
    *,
    right: Collection[str] = (),
    max_widths: Mapping[str, int] | None = None,
) -> str:
    """Return rows of cells as aligned columns, without colours or trailing blanks.

    Args:
        rows: The cells of each row. A cell may have several lines; its text is not interpreted as markup.
        headers: Titles of the columns; empty for a table without a header.
        right: Titles of the right-aligned columns.
        max_widths: Widths, by title, at which the cells of a column are wrapped. Other columns are as wide as their
            widest cell.
    """
    # Import rich only here: it takes longer than everything else that the launcher needs to start.
    from rich.console import Console  # noqa: PLC0415
    from rich.rule import Rule  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    widths = max_widths or {}
    cells = [[Text(str(cell)) for cell in row] for row in rows]
    titles = list(headers) or [""] * max(map(len, cells), default=0)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(justify="right" if title in right else "left", max_width=widths.get(title), overflow="fold")
    if headers:
        table.add_row(*map(Text, headers))
        table.add_row(*[Rule(characters="-") for _ in headers])
    for row in cells:
        table.add_row(*row)
    drawn = "".join(segment.text for segment in Console(width=_UNLIMITED).render(table))
    return "\n".join(line.rstrip() for line in drawn.removesuffix("\n").split("\n"))
