"""Failure modes x roles x moments. Each is an emulated job of two trainer hosts with one rank each, and data hosts.

``MATRIX`` parametrizes the test and is the source of the table in docs/lifecycle.md. To print the table, run
``python -m tests.integration.launcher.test_failure_modes``.
"""

import re
import subprocess
import sys
from dataclasses import dataclass

import psutil
import pytest

from lightning_sm.job.variables import HOST_FOLDER
from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.quick_processes import python_path

TIMEOUT_S = 120
# From the first host's exit to the last one's. The emulator allows 25 s; the rest is for a busy machine.
TOGETHER_S = 45.0
MAX_REASON_CHARS = 1024
PAGE = REPOSITORY / "docs" / "lifecycle.md"
# Without hooks, the data hosts create no DataLoaders.
HOOKS_THERE = ("--data_service.hooks", "data")
# A larger window lets the trainers fetch the whole epoch before their data host is gone.
FEW_AHEAD = ("--data_service.window_batches", "4")
# The defaults exceed the 25 s after which the emulator kills the hosts.
SHORT_TIMEOUTS = ("--data_service.lease_s", "5", "--data_service.batch_timeout_s", "5")
EITHER = (1, 143)  # the other rank loses its peer (1) or gets SIGTERM (143), whichever comes first
STOPPED = r"The job was stopped or interrupted \(SIGTERM\)\. "
PEER_LEFT = r"RuntimeError: .*by peer"  # the other rank saw the failure first and exited
# The other rank failed first, and this host's launcher sent SIGTERM while this rank was still exiting because of that.
ENDED = r"killed by SIGTERM \(exit code 143\) .*\s.*RuntimeError: .*by peer"
SAVED = "Training saved its state and exited"  # after training on the batches that it still had
KILLED = r"killed by SIGKILL \(exit code 137\)"


@dataclass(frozen=True)
class Cell:
    """One failure mode, of one role, at one moment.

    Attributes:
        mode: The failure.
        role: The hosts that it happens to.
        moment: When it happens.
        main: Allowed exit codes of the main trainer host.
        other: Allowed exit codes of the other trainer host.
        data: Allowed exit codes of every data host.
        job: The emulator's exit code, which is the exit code of the host that failed first.
        first: The host whose reason the others repeat; None if no host can write a reason.
        reason: Regular expression for the start of that host's failure file.
        other_reasons: If ``first`` is None, regular expression for the start of the trainers' failure files, if any.
        fails: Values of FAILS and FAILS_ON for the script.
        options: Options for the emulator.
        arguments: Arguments for the script.
        num_data_hosts: Number of data hosts.
    """

    mode: str
    role: str
    moment: str
    main: tuple[int, ...] = (0,)
    other: tuple[int, ...] = (0,)
    data: tuple[int, ...] = (0,)
    job: int = 0
    first: str | None = None
    reason: str = ""
    other_reasons: str = ""
    fails: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    num_data_hosts: int = 1

    def __str__(self) -> str:
        return f"{self.mode}, {self.role}, {self.moment}"

    def row(self) -> str:
        """Format this cell as a row of the table in the documentation."""
        codes = [" or ".join(map(str, codes)) for codes in (self.main, self.other, self.data)]
        return "| " + " | ".join([self.mode, self.role, self.moment, *codes, str(self.job)]) + " |"


def fault(kind, when, *more):
    """Return the emulator's options for a fault."""
    return ("--fault", f"{kind}@{when}", *more)


# An epoch has 30 steps.
PERIODIC = (
    *("--trainer.callbacks+", "pytorch_lightning.callbacks.ModelCheckpoint"),
    *("--trainer.callbacks.every_n_train_steps", "7"),
)
RESTARTS = ("--env", "LIGHTNING_SM_MAX_RESTARTS=1")
# The error, then its location, which must have the same rank.
EXCEPTION = r"ArithmeticError: rank (\d) fails at step (\d+|val)\non trainer host algo-\d, rank \1 \(exit code 1\)\n"
LAST_LINES = r"exit code {} on (trainer|data) host algo-\d(, rank \d)?; last lines of stderr"
MATRIX = [
    Cell("success", "all", "end"),
    Cell(
        "exception",
        "main trainer",
        "first step",
        main=(1,),
        other=EITHER,
        job=1,
        first="main",
        reason=EXCEPTION,
        fails=("exception@0", "0"),
    ),
    Cell(
        "exception",
        "other trainer",
        "validation",
        main=EITHER,
        other=(1,),
        job=1,
        first="other",
        reason=EXCEPTION,
        fails=("exception@val", "1"),
    ),
    Cell(
        "os._exit(7)",
        "main trainer",
        "last step",
        main=(7,),
        other=EITHER,
        job=7,
        first="main",
        reason=LAST_LINES.format(7),
        fails=("exit@59", "0"),
    ),
    Cell(
        "SIGKILL of a rank",
        "other trainer",
        "last step",
        main=EITHER,
        other=(137,),
        job=137,
        first="other",
        reason=KILLED,
        fails=("kill@59", "1"),
    ),
    Cell(
        "SIGKILL of the second local rank",
        "main trainer",
        "mid-epoch",
        main=(137,),
        other=EITHER,
        job=137,
        first="main",
        reason=KILLED + r" on trainer host algo-\d, rank 1;",
        fails=("kill@10", "1"),
        options=("--devices", "2"),
    ),
    Cell(
        "sys.exit(9) of the second local rank",
        "other trainer",
        "mid-epoch",
        main=EITHER,
        other=(9,),
        job=9,
        first="other",
        reason=r"exit code 9 on trainer host algo-\d, rank 3;",
        fails=("sys.exit@10", "3"),
        options=("--devices", "2"),
    ),
    Cell(
        "SIGKILL of the launcher",
        "other trainer",
        "mid-epoch",
        main=EITHER,
        other=(137,),
        job=137,
        other_reasons=STOPPED,
        options=fault("kill-launcher:trainer-2", "step=10"),
        arguments=SHORT_TIMEOUTS,
    ),
    Cell(
        "SIGKILL of the whole host",
        "main trainer",
        "mid-epoch",
        main=(137,),
        other=EITHER,
        job=137,
        other_reasons=STOPPED,
        options=fault("kill:trainer-1", "step=10"),
        arguments=SHORT_TIMEOUTS,
    ),
    Cell(
        "import error",
        "all",
        "start-up",
        main=EITHER,
        other=EITHER,
        data=(0, 1),
        job=1,
        first="any",
        reason="ImportError: ",
        fails=("import", "all"),
    ),
    Cell(
        "import error",
        "other trainer",
        "start-up",
        main=EITHER,
        other=(1,),
        job=1,
        first="other",
        reason="ImportError: ",
        fails=("import", "1"),
    ),
    Cell(
        "SIGTERM to all hosts",
        "all",
        "mid-epoch",
        main=(143,),
        other=(143,),
        job=143,
        other_reasons=STOPPED,
        options=fault("stop", "step=10,skew=0.05"),
    ),
    Cell(
        "SIGTERM to all hosts",
        "all",
        "start-up",
        main=(143,),
        other=(143,),
        job=143,
        other_reasons=STOPPED,
        options=fault("stop", "start"),
    ),
    Cell(
        "SIGKILL of the whole host",
        "only data host",
        "mid-epoch",
        main=EITHER,
        other=EITHER,
        data=(137,),
        job=137,
        other_reasons=STOPPED + rf"(lightning_sm\.errors\.Data|{PEER_LEFT}|{ENDED}|{SAVED})",
        options=fault("kill:data-1", "step=10"),
        arguments=(*SHORT_TIMEOUTS, *FEW_AHEAD),
    ),
    Cell(
        "SIGKILL of the launcher",
        "only data host",
        "mid-epoch",
        main=(143,),
        other=(143,),
        data=(137,),
        job=137,
        other_reasons=STOPPED,
        options=fault("kill-launcher:data-1", "step=10"),
    ),
    Cell(
        "hangs forever",
        "only data host",
        "mid-epoch",
        main=EITHER,
        other=EITHER,
        data=(137,),
        job=1,
        first="any",
        reason=r"lightning_sm\.errors\.Data(Timeout|HostUnreachable)Error: ",
        options=fault("hang:data-1", "step=10"),
        arguments=(*SHORT_TIMEOUTS, *FEW_AHEAD),
    ),
    Cell(
        "os._exit(7)",
        "one of two data hosts",
        "creating the DataLoader",
        fails=("exit@open", "data-0"),
        arguments=HOOKS_THERE,
        num_data_hosts=2,
    ),
    Cell(
        "os._exit(7)",
        "only data host",
        "creating the DataLoader",
        main=EITHER,
        other=EITHER,
        data=(7,),
        job=7,
        first="any",
        reason=LAST_LINES.format(7),
        fails=("exit@open", "data-0"),
        arguments=HOOKS_THERE,
    ),
    Cell(
        "SIGKILL of a rank, with one restart allowed",
        "main trainer",
        "second epoch",
        options=fault("kill-rank:trainer-1", "step=45", *RESTARTS),
        arguments=PERIODIC,
    ),
]


def run_job(folder, cell):
    """Run the cell's job, and return its exit code and output."""
    fails = dict(zip(("FAILS", "FAILS_ON"), cell.fails, strict=False))
    env = {"NOTES": str(folder / "notes"), "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(REPOSITORY), **fails}
    command = [
        *(
            sys.executable,
            "-m",
            "lightning_sm",
            "local",
            "--group",
            "trainer=2",
            "--group",
            f"data={cell.num_data_hosts}",
        ),
        *("--seed", "1", "--base-dir", str(folder / "jobs"), "--checkpoints", str(folder / "checkpoints")),
        *(word for name, value in env.items() for word in ("--env", f"{name}={value}")),
        *cell.options,
        *("--", str(SCRIPTS / "train_and_note.py"), "fit", "--trainer.max_epochs", "2", "--model.step_s", "0.02"),
        *cell.arguments,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return ended.returncode, ended.stdout + ended.stderr


def hosts_of(folder, output):
    """Map each host's part in the job to its exit code, seconds, failure file (or None) and name."""
    rows = re.findall(r"^(algo-\d+) +\S+ +(trainer|data) +(\d*) +([\d.]+)", output, re.MULTILINE)
    trainers = sorted(name for name, role, *_ in rows if role == "trainer")
    parts = dict(zip(trainers, ("main", "other"), strict=True))
    found = {}
    for name, _, code, seconds in rows:
        paths = list(folder.glob(f"jobs/*/{name}/output/failure"))
        reason = paths[0].read_text(encoding="utf-8") if paths else None
        found[parts.get(name, name)] = (int(code), float(seconds), reason, name)
    return found


def left_of(folder):
    """Return the command lines of processes that belong to hosts in the folder."""
    processes = psutil.process_iter(["environ", "cmdline"])  # None if the process is not readable or has exited
    return [
        process.info["cmdline"]
        for process in processes
        if str(folder) in (process.info["environ"] or {}).get(HOST_FOLDER.name, "")
    ]


@pytest.fixture(scope="module")
def job_of(tmp_path_factory):
    """Run a cell's job once, and return its folder, exit code and output."""
    made = {}

    def ended(cell):
        if cell not in made:
            folder = tmp_path_factory.mktemp("job")
            made[cell] = (folder, *run_job(folder, cell))
        return made[cell]

    return ended


@pytest.mark.processes
@pytest.mark.matrix(rows=["SIGKILL of the whole host, only data host"])
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_a_job_ends_well_however_it_ends(job_of, cell):
    """All hosts exit together with the expected exit codes and reasons, and no process is left behind."""
    folder, code, output = job_of(cell)
    hosts = hosts_of(folder, output)
    assert code == cell.job, output
    assert "did not happen" not in output
    data = [host for part, host in hosts.items() if part not in {"main", "other"}]
    assert len(data) == cell.num_data_hosts
    assert hosts["main"][0] in cell.main, output
    assert hosts["other"][0] in cell.other, output
    assert all(host[0] in cell.data for host in data), output
    ends = [host[1] for host in hosts.values()]
    assert max(ends) - min(ends) < TOGETHER_S, output
    assert not left_of(folder)
    reasons = [host[2] for host in hosts.values() if host[2] is not None]
    assert all(0 < len(reason) <= MAX_REASON_CHARS for reason in reasons)
    assert [host for host in hosts.values() if host[0] == 0 and host[2] is not None] == []
    if cell.first is not None:
        check_first(cell, hosts, output)
    else:
        for part in ("main", "other"):
            exit_code, _, reason, _ = hosts[part]
            assert reason is None if exit_code in {0, 137} else re.match(cell.other_reasons, reason), output


def check_first(cell, hosts, output):
    """Check that the host that failed first names itself in its reason, and that the other trainer repeats the reason.

    The failed host's launcher reports before the emulator stops the others. A host that is stopped before the report
    arrives would give the stop as its reason.
    """
    if cell.first == "any":  # all hosts fail for the same reason, in any order
        assert any(re.search(cell.reason, host[2] or "") for host in hosts.values()), output
        assert all(re.match(f"({cell.reason}|{STOPPED})", hosts[part][2]) for part in ("main", "other")), output
        return
    _, _, reason, name = hosts[cell.first]
    assert re.match(cell.reason, reason), output
    assert f" host {name}" in reason
    assert hosts["other" if cell.first == "main" else "main"][2] == reason, output


def numbers_of(folder):
    """Map each batch of each rank to the last number noted for it: a resumed run repeats steps since its checkpoint."""
    found = {}
    for path in (folder / "notes").glob("*.txt"):
        for line in path.read_text().splitlines():
            *where, number = line.split()
            found[(path.stem, *where)] = number
    return found


@pytest.mark.proof
@pytest.mark.processes
def test_a_restart_changes_no_number(job_of):
    """A job that is killed in mid-epoch restarts from a checkpoint and has the same losses as an undisturbed job."""
    undisturbed, code, output = job_of(MATRIX[0])
    assert code == 0, output
    (restarted,) = [cell for cell in MATRIX if cell.arguments == PERIODIC]
    killed, code, output = job_of(restarted)
    assert code == 0, output
    assert "Restart 1 of 1: all trainer hosts restart from the latest valid checkpoint." in output
    assert re.search(r"Resuming from \S+step=4\d.ckpt, the latest valid checkpoint of the job", output), output
    assert len(re.findall(r"Data host algo-\d serves at", output)) == 1, output  # the data host is not restarted
    numbers = numbers_of(undisturbed)
    assert len({key for key in numbers if key[1] == "train"}) == 2 * 60
    assert numbers_of(killed) == numbers


def table():
    """Format ``MATRIX`` as the table in the documentation."""
    names = ["failure mode", "who", "when", "main trainer", "other trainer", "data hosts", "job"]
    return "\n".join(["| " + " | ".join(names) + " |", "|" + "---|" * len(names), *(cell.row() for cell in MATRIX)])


def test_the_documentation_has_the_matrix():
    """The table in docs/lifecycle.md matches the tested cells and their exit codes."""
    assert table() in PAGE.read_text(encoding="utf-8"), (
        "python -m tests.integration.launcher.test_failure_modes prints it"
    )


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
