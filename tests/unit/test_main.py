"""The command line, and the modules that its commands load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_sm.__main__ import main


@pytest.mark.parametrize("argument", ["doctor", "--help"])
def test_commands_start_without_torch(argument):
    """Commands load neither torch, Lightning nor the SDK, which take seconds to import."""
    code = (
        "import sys\nfrom lightning_sm.__main__ import main\n"
        f"try:\n    main([{argument!r}])\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'pytorch_lightning', 'lightning', 'grpc', 'sagemaker', 'boto3'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["reprot"], "unknown command reprot. Did you mean report?"),
        (["dokter"], "unknown command dokter. Did you mean doctor?"),
        (["tpo"], "unknown command tpo. Did you mean report --live?"),
        (["xyzzy"], "unknown command xyzzy.\n"),
        (["--versoin"], "unknown option --versoin. Did you mean --version?"),
        (["report", "x", "--onec"], "lightning-sm report: error: unknown option --onec. Did you mean --once?"),
        (["local", "--groups", "trainer=2", "--", "a.py"], "unknown option --groups. Did you mean --group?"),
        (["doctor", "now"], "lightning-sm doctor: error: unexpected arguments: now"),
        (["completion", "fish"], "invalid choice: 'fish'"),
    ],
)
def test_an_unknown_word_is_answered_with_a_similar_one(capsys, args, words):
    """Commands and the subcommand's options get suggestions, and the exit code is 2."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_no_command_is_a_question_for_help(capsys):
    """Without a command, the list of commands is printed to stdout, and the exit code is 0."""
    assert main([]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("usage: lightning-sm ")
    assert "watch a running job" in output.out
    assert output.err == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["train.py", "--group", "trainer=2"],
            ["lightning-sm local --group ... -- train.py", "local -- train.py --group"],
        ),
        (
            ["--seed", "1", "train.py", "fit", "--devices=2"],
            ["--devices=2 comes after train.py", "-- train.py fit --devices=2"],
        ),
    ],
)
def test_own_options_behind_the_script_are_no_guess(caplog, args, words):
    """The error explains "--": without it, the script gets these options, and the emulator starts one host."""
    with caplog.at_level("ERROR", "lightning_sm"):
        assert main(["local", *args]) == 2
    for word in words:
        assert word in caplog.text
