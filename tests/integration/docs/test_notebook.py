"""The documentation's notebook, as stored and as executed in a kernel of this environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
NOTEBOOK = REPOSITORY / "docs" / "heterogeneous.ipynb"
TIMEOUT_S = 600
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def code_cells(path):
    """Read a notebook's code cells."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def shown(cells):
    """Return the text of all outputs, and the set of their MIME types."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    return "".join("".join(output.get("text", "")) for output in outputs), kinds


def test_the_notebook_has_what_it_shows():
    """The stored notebook has the comparison and the plots, and no path of the machine that ran it."""
    cells = code_cells(NOTEBOOK)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    text, kinds = shown(cells)
    assert "cost to train" in text
    assert "image/png" in kinds
    assert not re.search(r"/(?:tmp|home|root|work|usr)/", NOTEBOOK.read_text(encoding="utf-8"))


@pytest.mark.proof
@pytest.mark.processes
def test_the_notebook_runs(tmp_path):
    """The notebook runs in a kernel of this environment, and shows the comparison and the plots of both jobs."""
    pytest.importorskip("nbclient", reason="group proof")
    pytest.importorskip("ipykernel", reason="group proof")
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    folders = {name: str(tmp_path / name.lower()) for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "TMPDIR")}
    (tmp_path / "tmpdir").mkdir()
    env = {**os.environ, **folders, "JUPYTER_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    executed = tmp_path / "executed.ipynb"
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(executed)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text, kinds = shown(code_cells(executed))
    assert re.search(r"^time of a step +\d", text, re.MULTILINE)
    assert re.search(r"^cost to train +\$", text, re.MULTILINE)
    assert "image/png" in kinds
