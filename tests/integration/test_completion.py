"""Shell completion in bash and zsh."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys

import pytest

from tests.integration.terminals import read_terminal

pytest.importorskip("shtab", reason="needs shtab (extra completion)")

# Sets the variables that readline sets, and prints the completions that the script's function returns.
_COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
name=$(complete -p lightning-sm); name=${name##*-F }
${name%% *} lightning-sm "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""

# The quotes keep the awaited word out of the terminal's echo.
_SET_UP_ZSH = (
    b"fpath=($HOME $fpath); autoload -Uz compinit; compinit -u -D; bindkey '^I' complete-word; print 'is'-ready\n"
)


def write_script(shell, path):
    """Write the completion script for a shell."""
    with path.open("w") as file:
        subprocess.run([sys.executable, "-m", "lightning_sm", "completion", shell], stdout=file, timeout=60, check=True)
    return path


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The completion script for bash."""
    return write_script("bash", tmp_path_factory.mktemp("completion") / "lightning-sm")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], {"train"}),
        (["report", "--on"], {"--once"}),
        (["local", "--gr"], {"--group", "--grace-s"}),
        (["submit", "--dr"], {"--dry-run"}),
        (["submit", "--spot."], {"--spot.max_wait_s"}),
        (["jobs", "l"], {"list", "logs"}),
        (["jobs", "logs", "--a"], {"--all"}),
        (["completion", ""], {"bash", "zsh"}),
        (["submit", "jo"], {"job.yaml"}),
    ],
)
def test_bash_completes(script, tmp_path, words, offered):
    """Bash completes commands, options, keys of a job file, and files."""
    pytest.importorskip("boto3", reason="needs boto3, as lightning-sm jobs does")
    (tmp_path / "job.yaml").touch()
    done = subprocess.run(
        ["bash", "--norc", "-c", _COMPLETE, "bash", str(script), "lightning-sm", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh (Debian package zsh)")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tr", b"train "),
        ("submit --dr", b"--dry-run "),
        ("jobs lo", b"logs "),
        ("submit --spot.m", b"--spot.max_wait_s "),
    ],
)
def test_zsh_completes(tmp_path, typed, completed):
    """Zsh's completion system completes commands, options and keys of a job file in a terminal."""
    pytest.importorskip("boto3", reason="needs boto3, as lightning-sm jobs does")
    write_script("zsh", tmp_path / "_lightning-sm")
    ours, theirs = pty.openpty()
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb", "PS1": ""}
    call = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": env, "start_new_session": True}
    with os.fdopen(ours, "r+b", buffering=0), subprocess.Popen(["zsh", "-f", "-i"], **call) as zsh:
        os.close(theirs)
        try:
            os.write(ours, _SET_UP_ZSH)
            assert b"is-ready" in read_terminal(ours, lambda text: b"is-ready" in text)
            os.write(ours, f"lightning-sm {typed}\t".encode())
            assert completed in read_terminal(ours, lambda text: completed in text)
        finally:
            zsh.kill()
