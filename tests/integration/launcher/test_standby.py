"""The process that waits with its imports done, and then runs a script as a new interpreter would."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest

from lightning_sm.job.control_folder import ControlFolder, OwnProcess
from lightning_sm.job.imports import Imports
from lightning_sm.launcher import rank_processes
from lightning_sm.launcher.standby import Standby, waiting_command
from tests.integration.emulators import until

_TIMEOUT_S = 60
_SHOW = """
import json, multiprocessing, os, sys
shown = {
    "argv": sys.argv, "name": __name__, "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path[0], "stdin": sys.stdin.read(), "variable": os.environ.get("SET_BY_SCRIPT"), "cwd": os.getcwd(),
    "spec": repr(__spec__), "annotations": __annotations__ if "__annotations__" in globals() else {},
}
if "imported" in sys.argv:
    shown["imported"] = "psutil" in sys.modules
print(json.dumps(shown), flush=True)
"""


@pytest.fixture
def control(tmp_path):
    """The folder of a script that trains."""
    folder = tmp_path / "control"
    folder.mkdir()
    with ControlFolder(folder) as made:
        yield made


@pytest.fixture
def run(tmp_path, control):
    """A function that runs a command in a standby process, and returns its exit code, stdout and stderr."""
    made = []

    def start(*command, modules=(), environment=None, starter=()):
        standby = Standby(control)
        made.append(standby)
        imports = {"modules": list(modules), "environment": environment or {}}
        (control.path / "imports.json").write_text(json.dumps(imports))
        command = [*starter, *waiting_command([sys.executable, "-u", *command])]
        stdout = tmp_path / "stdout"
        with stdout.open("w") as file:
            saved = os.dup(1)
            os.dup2(file.fileno(), 1)  # a script's stdout is the launcher's
            try:
                standby.prepare(command, tmp_path, os.environ)
                until(lambda: standby.pid, "a process waits", _TIMEOUT_S)
                process = standby.take(command, tmp_path, os.environ)
            finally:
                os.dup2(saved, 1)
                os.close(saved)
        stderr = process.stderr.read().decode()
        code = process.wait(_TIMEOUT_S)
        process.stderr.close()
        return code, stdout.read_text(), stderr

    yield start
    for standby in made:
        standby.close()


def test_a_script_sees_what_a_new_interpreter_shows_it(tmp_path, run):
    """Arguments, folders, module, an empty stdin; packages are imported, variables of the script are not set."""
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "show.py"
    script.write_text(_SHOW)
    expected = subprocess.run(
        [sys.executable, "-u", str(script), "--x", "1"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT_S,
    )
    code, stdout, stderr = run(str(script), "--x", "1", environment={"SET_BY_SCRIPT": "1"})
    assert (code, stderr) == (0, "")
    assert json.loads(stdout) == json.loads(expected.stdout)
    code, stdout, _ = run(str(script), "imported", modules=["no_such_module", "psutil"])
    assert json.loads(stdout)["imported"] is True


def test_a_module_is_run_as_by_the_option(tmp_path, run):
    """SDK v2 starts packages in this way."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    code, stdout, stderr = run("-m", "package", "a")
    assert (code, stdout, stderr) == (0, "__main__ package ['a']\n", "")


@pytest.mark.parametrize(
    ("text", "code", "ending"),
    [
        ("import sys\nsys.exit(7)", 7, ""),
        ("import os\nos._exit(9)", 9, ""),
        ("raise SystemExit('a reason')", 1, "a reason\n"),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError: division by zero\n"),
        ("(", 1, "SyntaxError: '(' was never closed\n"),
    ],
)
def test_a_script_ends_as_in_an_interpreter(tmp_path, run, text, code, ending):
    """With the same exit code, and the same traceback, in which this package does not appear."""
    script = tmp_path / "train.py"
    script.write_text(text)
    expected = subprocess.run(
        [sys.executable, "-u", str(script)], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    found, _, stderr = run(str(script))
    assert found == code == expected.returncode
    assert stderr.endswith(ending)
    assert stderr == expected.stderr


def test_a_process_for_another_command_is_not_used(tmp_path, control):
    """It is ended; so is one that nobody needs, and one that has ended by itself is no process to use."""
    command = waiting_command([sys.executable, "-u", str(tmp_path / "train.py")])
    (control.path / "imports.json").write_text(json.dumps({"modules": [], "environment": {}}))
    standby = Standby(control)
    for end in ("other", "gone", "close"):
        standby.prepare(command, tmp_path, {})
        until(lambda: standby.pid, "a process waits", _TIMEOUT_S)
        pid = standby.pid
        if end == "other":
            assert standby.take([*command, "--x"], tmp_path, {}) is None
        elif end == "gone":
            os.kill(pid, 9)
            until(lambda: standby._process.poll() is not None, "it has ended", _TIMEOUT_S)
            assert standby.take(command, tmp_path, {}) is None
        else:
            standby.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_nothing_is_started_before_the_script_trains(tmp_path, control):
    """A script that fails before needs no quick restart."""
    standby = Standby(control)
    command = waiting_command([sys.executable, "-u", "train.py"])
    standby.prepare(command, tmp_path, {})
    assert standby.take(command, tmp_path, {}) is None


_RANK = """
import os, signal, sys
shown = os.environ["RANK"], os.environ["LOCAL_RANK"], "psutil" in sys.modules, repr(sys.stdin.read()), sys.argv[1:]
# At once: an unbuffered print() writes each word by itself, between those of the other rank.
os.write(1, (" ".join(map(str, shown)) + "\\n").encode())
if os.environ["RANK"] == "5":
    open("printed").close()  # once rank 4 has opened it too
    sys.exit(3)
open("printed", "w").close()
signal.pause()
"""


def test_several_ranks_wait_with_their_imports_done(tmp_path, run, monkeypatch):
    """Each runs the script as its rank, and the first failure among them counts."""
    script = tmp_path / "train.py"
    script.write_text(_RANK)
    os.mkfifo(tmp_path / "printed")
    monkeypatch.setenv("GROUP_RANK", "2")
    starter = [sys.executable, "-I", rank_processes.__file__, "2", str(tmp_path / "peers-gone"), "0", "9", "copy"]
    code, stdout, stderr = run(str(script), "--x", modules=["psutil"], starter=starter)
    assert sorted(stdout.splitlines()) == ["4 0 True '' ['--x']", "5 1 True '' ['--x']"]
    assert stderr == "lightning-sm: rank 5 exited with code 3. Ending the other ranks of this host.\n"
    assert code == 3


def test_ranks_that_wait_in_vain_are_ended(tmp_path, control, monkeypatch):
    """With the process that has started them."""
    (control.path / "imports.json").write_text(json.dumps({"modules": [], "environment": {}}))
    monkeypatch.setenv("GROUP_RANK", "0")
    starter = [sys.executable, "-I", rank_processes.__file__, "2", str(tmp_path / "peers-gone"), "9", "9", "copy"]
    standby = Standby(control)
    standby.prepare([*starter, *waiting_command([sys.executable, "-u", "train.py"])], tmp_path, os.environ)
    until(lambda: standby.pid, "a process waits", _TIMEOUT_S)
    process = psutil.Process(standby.pid)
    until(lambda: len(process.children()) == 2, "its ranks wait", _TIMEOUT_S)
    ranks = process.children()
    standby.close()
    gone, alive = psutil.wait_procs(ranks, _TIMEOUT_S)
    assert len(gone) == 2
    assert not alive


def test_a_process_says_what_it_has_imported(control, monkeypatch):
    """Modules of installed packages in their order, and the variables that it has set since its start."""
    monkeypatch.setenv("SET_BY_SCRIPT", "yes")
    OwnProcess(control.path).note_imports()
    assert control.imports() is None, "the job does not restart"
    monkeypatch.setenv("LIGHTNING_SM_RESTART_DIR", "/restarts")
    OwnProcess(control.path).note_imports()
    imports = control.imports()
    assert imports == Imports.of_this_process()
    assert imports.environment["SET_BY_SCRIPT"] == "yes"
    assert "HOME" not in imports.environment or os.environ["HOME"] != imports.environment["HOME"]
    assert {"pytest", "lightning_sm.job.imports"} <= set(imports.modules)
    assert not {"json", "os", "sys"} & set(imports.modules)
