"""Pictures of a terminal (docs/terminal.py)."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
TERMINAL = runpy.run_path(str(DOCS / "terminal.py"))
TimedLine = TERMINAL["TimedLine"]


def test_lines_keep_their_order_and_no_pause_is_long():
    """Pauses of a recording are shortened to 1.2 s at most."""
    paced = TERMINAL["paced"]([TimedLine(0.0, "$ a"), TimedLine(90.0, "b"), TimedLine(90.4, "c")])
    assert [line.text for line in paced] == ["$ a", "b", "c"]
    assert [round(line.at_s, 2) for line in paced] == [0.0, 1.2, 1.3]


def test_a_picture_shows_each_line_from_its_time_on_and_ends_with_the_last_ones():
    """Text is escaped, and the picture scrolls if there are more lines than rows."""
    lines = [TimedLine(float(number), f"<{number} & more>") for number in range(30)]
    picture = TERMINAL["moving"]("a & b", lines)
    root = ET.fromstring(picture)  # noqa: S314  # made here
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [line.text for line in lines]
    total_s = 29 + TERMINAL["_END_S"]
    assert f"@keyframes l9 {{ 0%, {900 / total_s:.2f}% {{ opacity: 0 }}" in picture
    moves = [int(one) for one in re.findall(r"translateY\((-?\d+)px\)", picture)]
    assert moves[0] == 0
    assert moves[-1] == min(moves) == -(30 - TERMINAL["_ROWS"]) * TERMINAL["_LINE_PX"]


def test_a_still_picture_has_the_colours_of_light_and_dark():
    """Each kind of line has a colour in both modes, continued rows keep their colour, and long lines are cut."""
    table = ["$ doctor", "names  problem  not found", "                of three", "own    ok       free", "x" * 200]
    picture = TERMINAL["still"]("a table", table)
    root = ET.fromstring(picture)  # noqa: S314  # made here
    texts = [(one.get("class").split()[1], one.text) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [kind for kind, _ in texts] == ["command", "bad", "bad", "other", "other"]
    assert texts[-1][1] == "x" * (TERMINAL["_COLUMNS"] - 1) + "…"
    light, dark = picture.split("@media (prefers-color-scheme: dark)")
    for kind in {*TERMINAL["_KINDS"], "background", "other"}:
        assert f".{kind} {{ fill: #" in light
        assert f".{kind} {{ fill: #" in dark


def test_a_line_is_shortened_but_not_changed():
    """A line is shortened by leaving out some metrics, folders and the run's name."""
    line = "algo-1 | epoch=1/4 step=16 validation=1 train_loss_step=1.7 val_acc=0.6 memory_gb=1.17 data_wait=0.1%"
    assert TERMINAL["shortened"](line) == "algo-1 | epoch=1/4 step=16 validation=1 val_acc=0.6 data_wait=0.1%"
    saved = "Interrupted: step 40 is saved in /tmp/a/b/step=40.ckpt, 0.4 s after the signal."
    assert TERMINAL["shortened"](saved) == "Interrupted: step 40 is saved in …/step=40.ckpt, 0.4 s after the signal."
    verdict = "algo-1 | lightning-sm: local-20261128-184709-2fbb: Succeeded after 60 s. Limited by start-up."
    assert TERMINAL["shortened"](verdict) == "algo-1 | Succeeded after 60 s. Limited by start-up."


def test_the_picture_of_the_readme_is_one():
    """The picture shows the interruption, the resume and the verdict."""
    root = ET.parse(DOCS / "images" / "terminal.svg").getroot()  # noqa: S314  # made here
    texts = " ".join(root.itertext())
    for part in ("$ lightning-sm local", "Resuming from", "Succeeded after", "exit code"):
        assert part in texts
    assert re.search(r"Interrupted: step 4\d is saved", texts)
