"""Shell completion in bash and zsh."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("shtab", reason="needs shtab (extra completion)")

# Sets the variables that readline sets, and prints the completions that the script's function returns.
_COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
name=$(complete -p lightning-sm); name=${name##*-F }
${name%% *} lightning-sm "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The completion script for bash."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_sm", "completion", "bash"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    path = tmp_path_factory.mktemp("completion") / "lightning-sm"
    path.write_text(done.stdout)
    return path


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


def test_zsh_gets_the_same_commands():
    """The script for zsh's completion system has the same commands and options."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_sm", "completion", "zsh"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("#compdef lightning-sm\n")
    for word in ("train", "submit", "jobs", "--dry-run", "--spot.max_wait_s"):
        assert word in done.stdout
