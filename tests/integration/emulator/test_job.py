"""What an emulated job passes to its hosts, prints and keeps, with scripts that succeed without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.integration.emulators import SCRIPT_START, job_dir, local


def test_every_host_runs_the_script_and_lines_carry_its_name(jobs, work):
    """All hosts run the same script with the same arguments, and each output line starts with the host's name."""
    # The hosts wait for each other: a data host, whichever it is, is ended once the trainers have exited.
    (work / "train.py").write_text(
        SCRIPT_START
        + """
import pathlib, sys, time
print('argv', sys.argv[1:], flush=True)
folder = pathlib.Path(__file__).with_name("seen")
folder.mkdir(exist_ok=True)
(folder / host).touch()
deadline = time.monotonic() + 60
while len(seen := list(folder.iterdir())) < 3:
    assert time.monotonic() < deadline, f"only these hosts have run the script: {seen}"
    time.sleep(0.02)
"""
    )
    ended = local(jobs, work, "--group", "trainer=2", "--group", "data=1", "--", "train.py", "fit", "--x=1")
    assert ended.returncode == 0
    for host in ("algo-1", "algo-2", "algo-3"):
        assert f"{host} | argv ['fit', '--x=1']" in ended.stdout.splitlines()
    assert "\x1b" not in ended.stdout


def test_dashes_before_the_script_are_optional(jobs, work):
    """The script may follow the options directly; dashes among its arguments are passed on."""
    (work / "train.py").write_text("import sys\nprint('argv', sys.argv[1:])")
    assert "algo-1 | argv ['--a', '--', 'b']" in local(jobs, work, "--seed", "1", "train.py", "--a", "--", "b").stdout


def test_summary_shows_group_role_and_exit_code(jobs, work):
    """The final table has one row per host, with its group, role and exit code."""
    (work / "train.py").write_text("")
    ended = local(jobs, work, "--group", "trainer=1", "--group", "data=1", "--seed", "1", "--", "train.py")
    table = ended.stdout[ended.stdout.index("host ") :]
    assert re.search(r"^algo-\d +trainer +trainer +0 +\d+\.\d$", table, re.MULTILINE)
    assert re.search(r"^algo-\d +data +data +0 +\d+\.\d$", table, re.MULTILINE)


def test_discard_removes_the_folders_after_success_only(jobs, work):
    """--discard removes the folders of a job that succeeds, but keeps the logs of one that fails."""
    (work / "train.py").write_text(SCRIPT_START + "open(base + '/model/m.bin', 'w').close()\nint(os.environ['CODE'])")
    assert local(jobs, work, "--discard", "--", "train.py", CODE="0").stdout.endswith("were removed (--discard).\n")
    assert list(jobs.iterdir()) == []
    assert local(jobs, work, "--discard", "--", "train.py", CODE="x").returncode == 1
    assert "ValueError" in (job_dir(jobs) / "algo-1" / "output" / "log.txt").read_text()


def test_the_last_line_is_where_the_model_lies(jobs, work):
    """The last line names the model's folder, and the line before it the hosts' folders, which are kept."""
    script = """
if host == 'algo-2':
    for name in ('model.ckpt', 'config.yaml'):
        open(f'{base}/model/{name}', 'w').write('x')
"""
    (work / "train.py").write_text(SCRIPT_START + script)
    ended = local(jobs, work, "--group", "trainer=2", "--", "train.py")
    job = job_dir(jobs)
    assert ended.stdout.splitlines()[-2:] == [
        f"Folders of the hosts: {job} (algo-*; logs: output/log.txt, data: output/data)",
        f"Model of algo-2: {job}/algo-2/model (config.yaml, model.ckpt)",
    ]
    assert (job / "algo-2" / "model" / "model.ckpt").read_text() == "x"
    assert (job / "algo-1" / "output" / "log.txt").read_text().startswith("lightning-sm ")


def test_old_runs_do_not_pile_up(tmp_path, work):
    """The temporary folder keeps the newest 20 runs."""
    base_dir = tmp_path / f"lightning-sm-{os.getuid()}"
    for number in range(22):
        (base_dir / f"local-20200101-1000{number:02}-a0b1" / "algo-1").mkdir(parents=True)
    (work / "train.py").write_text("")
    subprocess.run(
        [sys.executable, "-m", "lightning_sm", "local", "train.py"],
        check=True,
        cwd=work,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=90,
    )
    assert len(list(base_dir.iterdir())) == 20
    assert not (base_dir / "local-20200101-100002-a0b1").exists()


def test_output_that_is_not_text_passes(jobs, work):
    """Invalid UTF-8, progress bars and unterminated lines do not stop the emulator."""
    (work / "train.py").write_text(
        "import os\nos.write(1, b'\\xff\\xfe\\n50%\\r100%\\r\\n')\nos.write(2, b'no newline')"
    )
    ended = local(jobs, work, "--", "train.py")
    assert ended.returncode == 0
    for line in ("algo-1 | \ufffd\ufffd", "algo-1 | 100%", "algo-1 | no newline"):
        assert line in ended.stdout.splitlines()


def test_stray_variables_do_not_reach_the_hosts(jobs, work):
    """Variables of other launchers and jobs are removed; the user's variables and --env are kept."""
    (work / "train.py").write_text(
        "import json, os\nos.write(1, b'env ' + json.dumps(dict(os.environ)).encode() + b'\\n')"
    )
    stray = {
        "SM_MASTER_ADDR": "x",
        "NODE_RANK": "3",
        "MASTER_ADDR": "x",
        "OMPI_COMM_WORLD_RANK": "1",
        "PL_GLOBAL_SEED": "7",
    }
    others = {"LIGHTNING_SM_MAIN_PORT": "1", "WORLD_SIZE": "9", "TRAINING_JOB_ARN": "arn", "SLURM_NTASKS": "2"}
    ended = local(
        jobs,
        work,
        "--devices",
        "2",
        "--env",
        "MODE=fast",
        "--",
        "train.py",
        **stray,
        **others,
        SM_HOSTS="[]",
        MINE="1",
        OMP_NUM_THREADS="5",
    )
    line, _ = [line for line in ended.stdout.splitlines() if line.startswith("algo-1 | env ")]
    env = json.loads(line.removeprefix("algo-1 | env "))
    left = {name: env[name] for name in stray | others if name in env}
    assert left == {"MASTER_ADDR": "127.0.0.2", "NODE_RANK": "0", "WORLD_SIZE": "2"}
    assert (env["MINE"], env["MODE"], env["LIGHTNING_SM_DEVICES"], env["OMP_NUM_THREADS"]) == ("1", "fast", "2", "5")
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["SM_HOSTS"] == '["algo-1"]'
    assert env["TRAINING_JOB_NAME"].startswith("local-")
    assert env["AWS_REGION"]


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("name", "text"), [("h.json", '{"a": {"b": 1}, "c": "x y"}'), ("h.yaml", "a: {b: 1}\nc: x y\n")]
)
def test_hyperparameters_channels_and_checkpoints(jobs, work, tmp_path, name, text):
    """Hosts find hyperparameters, channels and checkpoints where the service puts them; checkpoints are uploaded."""
    (work / name).write_text(text)
    (work / "train.py").write_text(
        SCRIPT_START + "import json, sys\nopen(base + '/checkpoints/' + host, 'w').close()\n"
        "print('argv', sys.argv[1:])\nprint('data', open(base + '/input/data/training/f.txt').read())\n"
        "print('checkpoints', json.load(open(base + '/input/config/checkpointconfig.json')))\n"
    )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f.txt").write_text("found")
    options = ["--hyperparameters", name, "--channel", f"training={tmp_path / 'd'}", "--checkpoints", "checkpoints"]
    ended = local(jobs, work, "--group", "trainer=2", *options, "--", "train.py", "fit")
    folder = work / "checkpoints"
    assert ended.returncode == 0
    assert """algo-1 | argv ['fit', '--a={"b": 1}', '--c=x y']""" in ended.stdout
    assert "algo-2 | data found" in ended.stdout
    local_path = job_dir(jobs) / "ml" / "checkpoints"
    assert f"algo-1 | checkpoints {{'LocalPath': '{local_path}', 'S3Uri': 'file://{folder}'}}" in ended.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["algo-1", "algo-2", "lightning-sm-record"]
    assert (tmp_path / "d" / "f.txt").exists()
