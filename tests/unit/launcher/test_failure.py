"""A failure's reason: the original exception first, in at most 1024 characters."""

from __future__ import annotations

import signal
import traceback

import pytest
from msgspec.structs import replace

from lightning_sm.errors import ScriptError
from lightning_sm.job.failure_file import ProcessFailure
from lightning_sm.job.outcomes import Reason
from lightning_sm.job.topology import Role
from lightning_sm.launcher import failure
from lightning_sm.launcher.failure import Place, error_reason, script_failure
from lightning_sm.launcher.first_failure import EndedProcess

_PLACE = Place("algo-2", Role.TRAINER, rank=1)

_VALUE_ERROR = """\
Traceback (most recent call last):
  File "/code/train.py", line 30, in <module>
    main()
  File "/venv/lib/python3.11/site-packages/pytorch_lightning/trainer.py", line 500, in fit
    self._run(model)
    ^^^^^^^^^^^^^^^^
  File "/code/model.py", line 12, in forward
    raise ValueError("bad shape")
ValueError: bad shape
"""
_PEER = """\
Traceback (most recent call last):
  File "/code/train.py", line 30, in <module>
    main()
RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242
"""


def failure_reason(stderr_tail, exit_code, place=_PLACE):
    """The reason on the second of two trainer hosts with one process each, without a failure file."""
    return failure.failure_reason(stderr_tail, exit_code, place).text


def of_script(stderr_tail, exit_code, place=_PLACE, **options):
    """The failure of a script that writes no failure file."""
    process = EndedProcess(7, exit_code=exit_code, exited_at=1.0)
    return script_failure(process, exit_code, stderr_tail, place, **options)


def _printed(source: str, name: str = "/code/train.py") -> str:
    """What this Python version prints for the exception that the source raises."""
    try:
        exec(compile(source, name, "exec"), {})  # noqa: S102 - a literal of the test
    except SyntaxError as error:
        return "".join(traceback.format_exception_only(error))
    except Exception:  # noqa: BLE001 - whatever it raises is what is wanted
        return traceback.format_exc()
    raise AssertionError(source)


def test_exception_comes_first_then_its_place_then_user_frames():
    """The reason starts with the exception, then host and rank, then the user's frames without library frames."""
    assert failure_reason("Epoch 0 starts\n" + _VALUE_ERROR, 1).split("\n") == [
        "ValueError: bad shape",
        "on trainer host algo-2, rank 1 (exit code 1)",
        'File "/code/model.py", line 12, in forward: raise ValueError("bad shape")',
        'File "/code/train.py", line 30, in <module>: main()',
    ]


def test_a_rank_that_printed_its_number_is_named():
    """On a host with several processes, the rank comes from the traceback's prefix, and is omitted without one."""
    place = Place("algo-1", Role.TRAINER)
    prefixed = "".join(f"[rank13]: {line}\n" for line in _VALUE_ERROR.splitlines())
    assert failure_reason(prefixed, 1, place).splitlines()[1] == "on trainer host algo-1, rank 13 (exit code 1)"
    assert failure_reason(_VALUE_ERROR, 1, place).splitlines()[1] == "on trainer host algo-1 (exit code 1)"


def test_a_data_host_has_no_rank():
    """On a data host the reason starts with the user's error, and names the host but no rank."""
    reason = of_script(_VALUE_ERROR, 1, Place("algo-3", Role.DATA)).reason
    assert reason.text.splitlines()[:2] == ["ValueError: bad shape", "on data host algo-3 (exit code 1)"]
    killed = of_script("", 137, Place("algo-3", Role.DATA)).reason
    assert killed.text.startswith("killed by SIGKILL (exit code 137) on data host algo-3; nothing was")


def test_an_error_before_the_script_starts_names_the_host():
    """An error of the launcher itself becomes the reason, with this host's name."""
    place = Place("algo-3", Role.DATA)
    assert error_reason(ScriptError("no such script."), place) == "ScriptError: no such script.\non data host algo-3"
    assert error_reason(ScriptError("no such script."), None) == "ScriptError: no such script."
    assert error_reason(KeyError("x"), place).startswith("The launcher failed: KeyError: 'x'\n")


def test_frames_of_lightning_sm_are_not_the_users():
    """Frames of lightning_sm are omitted like any library's, even from a checkout; its errors show user frames only."""
    tail = _VALUE_ERROR.replace("/venv/lib/python3.11/site-packages/pytorch_lightning", "/src/lightning_sm/training")
    assert "lightning_sm" not in failure_reason(tail, 1)
    tail = _VALUE_ERROR.replace("/code/model.py", "/src/lightning_sm/data/trainer/feeder_client.py")
    assert "feeder_client.py" in failure_reason(tail, 1)
    reason = failure_reason(tail.replace("ValueError: ", "lightning_sm.errors.DataTimeoutError: "), 1)
    assert reason.splitlines()[2:] == ['File "/code/train.py", line 30, in <module>: main()']


def test_real_interpreter_output_is_understood():
    """The exception and its line are found in what this Python version prints for an uncaught exception."""
    reason = failure_reason(_printed("def f():\n    return 1 / 0\nf()"), 1)
    place = "on trainer host algo-2, rank 1 (exit code 1)"
    assert reason.startswith(f'ZeroDivisionError: division by zero\n{place}\nFile "/code/train.py", line 2, in f')


def test_raising_frame_in_a_library_is_kept():
    """The frame that raised the exception is kept even if it belongs to a library."""
    tail = _VALUE_ERROR.replace("/code/model.py", "/venv/lib/python3.11/site-packages/torch/nn.py")
    assert "site-packages/torch/nn.py" in failure_reason(tail, 1)


def test_the_last_exception_counts_if_stderr_ends_with_it():
    """The last exception is the reason; after a kill or with another exit code, no exception is."""
    assert failure_reason(_PEER + _VALUE_ERROR, 1).startswith("ValueError: bad shape\n")
    assert failure_reason(_VALUE_ERROR + _PEER, 1).startswith("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Conn")
    for code, ending in ((9, "exit code 9"), (137, "killed by SIGKILL (exit code 137)")):
        assert failure_reason(_VALUE_ERROR, code).startswith(f"{ending} on trainer host algo-2, rank 1; last lines of")


@pytest.mark.parametrize(
    "tail",
    [
        "optional kernel missing\n" + _VALUE_ERROR + "epoch 3 done\n",
        "Exception in thread uploader:\n" + _VALUE_ERROR,
        "Exception ignored in: <function X.__del__>\n" + _VALUE_ERROR,
    ],
)
def test_exceptions_that_ended_nothing_are_no_reason(tail):
    """Exceptions that were caught and logged, or raised in a background thread or ``__del__``, are not the reason."""
    assert failure_reason(tail, 1).startswith("exit code 1 on trainer host algo-2, rank 1; last lines of stderr:\n")


def test_what_libraries_write_at_exit_hides_no_exception():
    """Torch's C++ log and Python's warnings, printed after the exception, do not hide it."""
    late = "[rank0]:[W1124 20:53:11.1 ProcessGroup.cpp:15] Warning: leak\n/x/tracker.py:254: UserWarning: leak\n  f()\n"
    assert failure_reason(_VALUE_ERROR + late, 1).startswith("ValueError: bad shape\non trainer host")


def test_rank_prefixes_and_progress_bars_do_not_hide_a_traceback():
    """Prefixes of torch.distributed and an unfinished progress bar are stripped."""
    prefixed = "".join(f"[rank1]: {line}\n" for line in _VALUE_ERROR.splitlines())
    reason = failure_reason("Epoch 0:  50%|###   | 1/2\rEpoch 0:  50%|###   | 1/2" + prefixed, 1)
    assert reason.startswith("ValueError: bad shape\non trainer host algo-2, rank 1 (exit code 1)\n")
    assert reason.splitlines()[2].startswith('File "/code/model.py", line 12')


def test_interleaved_ranks_are_told_apart_by_their_prefix():
    """If two ranks print tracebacks line by line in turn, only the first one's frames are shown."""
    first = [f"[rank0]: {line}" for line in _VALUE_ERROR.splitlines()]
    second = [f"[rank1]: {line.replace('/code', '/other')}" for line in _VALUE_ERROR.splitlines()]
    tail = "\n".join(line for pair in zip(first, second, strict=True) for line in pair)
    reason = failure_reason(tail, 1)
    assert reason.startswith("ValueError: bad shape\non trainer host algo-2, rank 0 (")
    assert "/other" not in reason


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["before the cause", "after the cause"])
def test_a_rank_that_lost_its_connection_hides_no_cause(order):
    """Another rank's exception takes precedence over a lost connection, whichever rank prints first."""
    texts = [_PEER, _VALUE_ERROR]
    tail = "".join(f"[rank{rank}]: {line}\n" for rank in order for line in texts[rank].splitlines())
    assert failure_reason(tail, 1).startswith("ValueError: bad shape\non trainer host algo-2, rank 1 (")
    assert not of_script(tail, 1).is_consequence


def test_last_exception_of_a_chain_is_the_reason():
    """``raise X from Y`` gives X, which Python prints last."""
    reason = failure_reason(_printed("try:\n  {}['a']\nexcept KeyError as e:\n  raise RuntimeError('no a') from e"), 1)
    assert reason.startswith("RuntimeError: no a\n")


def test_usage_error_is_the_error_line():
    """Only the error is kept from the usage texts of argparse and jsonargparse."""
    usage = "usage: train.py [-h] [--a A]\n               {fit} ...\n"
    assert failure_reason(f"{usage}train.py: error: unrecognized arguments: --b=1\n", 2).startswith(
        "train.py: error: unrecognized arguments: --b=1\n"
    )
    tip = "tip: For details of accepted options run: train.py fit --help\n"
    assert failure_reason(f"{usage}{tip}error: Parser key 'x':\n  Not a valid int\n", 2).startswith(
        "error: Parser key 'x':\n  Not a valid int\n"
    )


def test_a_usage_error_keeps_what_stands_behind_an_empty_line():
    """A usage error keeps jsonargparse's explanation after an empty line, but no other process's output."""
    explained = (
        'error: Parser key "data":\n\n  - Does not validate against any of the Union subtypes\n  Errors:\n'
        "    - Multiple subclasses with name Data. Give the full class path to avoid ambiguity: a.Data, b.Data.\n"
        "  Given value: Data\n"
    )
    usage = "usage: train.py [-h] [--a A]\ntip: run: train.py --help\n"
    logged = "upload: error: try again\n"
    for tail in (usage + explained, (usage + explained) * 2, logged + usage + explained + _VALUE_ERROR):
        assert failure_reason(tail, 2).splitlines() == [
            *(line for line in explained.splitlines() if line),
            "on trainer host algo-2, rank 1 (exit code 2)",
        ]


def test_syntax_error_names_file_and_line():
    """The reason for a script that does not compile has the error, the file and the line."""
    reason = failure_reason(_printed("x = 1\ndef f(:\n"), 1)
    assert reason.startswith("SyntaxError: invalid syntax")
    assert 'File "/code/train.py", line 2' in reason


@pytest.mark.parametrize(("code", "name"), [(137, "SIGKILL"), (139, "SIGSEGV"), (143, "SIGTERM")])
def test_signal_is_named(code, name):
    """The reason for a killed script names the signal and ends with the script's last output."""
    reason = failure_reason("epoch 3 of 10\n", code)
    assert reason.startswith(f"killed by {name} (exit code {code})")
    assert reason.endswith("epoch 3 of 10")


def test_silent_failure_is_a_plain_sentence():
    """If nothing was written to stderr, the reason has only the exit code and the rank."""
    assert failure_reason("\n \n", 3) == ("exit code 3 on trainer host algo-2, rank 1; nothing was written to stderr")


def test_colours_are_stripped():
    """ANSI escape sequences do not reach the service's console."""
    assert failure_reason("\x1b[31mValue\x1b[0m is \x1b]8;;http://x\x07off\n", 1).endswith("Value is off")


@pytest.mark.parametrize(
    "tail",
    [
        _VALUE_ERROR.replace("bad shape", "x" * 5000),
        _VALUE_ERROR.replace("    main()\n", "    " + "m" * 3000 + "\n"),
        "y" * 5000,
        "line\n" * 5000,
    ],
)
def test_reason_is_never_longer_than_the_service_keeps(tail):
    """Long messages, lines and outputs are cut to 1024 characters, and keep the exit code."""
    assert 10 < len(failure_reason(tail, 1)) <= 1024
    assert "exit code 1" in failure_reason(tail, 1)


@pytest.mark.parametrize(
    ("lines", "headline"),
    [
        (("ValueError: num_nodes is 3.", "host  group", "algo-1  trainer"), "ValueError: num_nodes is 3. on "),
        (("ValueError: sizes do not match:", "3 and 4"), "ValueError: sizes do not match: 3 and 4 on "),
    ],
)
def test_a_table_below_a_sentence_is_not_in_the_headline(lines, headline):
    """The headline omits a table below a complete sentence, but joins a message that continues on a second line."""
    said = failure._with_place(lines, (), Place("algo-1", Role.TRAINER), "exit code 1")
    assert said.headline == f"{headline}trainer host algo-1 (exit code 1)"
    assert all(line in said.text for line in lines)


def test_the_headline_of_last_lines_is_the_very_last():
    """The headline has the last line of stderr, or an exception's first line and place; a stop comes before both."""
    place = Place("algo-1", Role.TRAINER)
    where = "exit code 3 on trainer host algo-1; last lines of stderr:"
    assert of_script("a warning\nno data\n", 3, place).reason == Reason(
        f"{where}\na warning\nno data", f"{where} no data"
    )
    stopped = of_script(_VALUE_ERROR, 1, place, stopped_by=signal.SIGTERM).reason
    stop = "The job was stopped or interrupted (SIGTERM). "
    assert stopped.headline == f"{stop}ValueError: bad shape on trainer host algo-1 (exit code 1)"


@pytest.mark.parametrize("tail", ["Traceback (most recent call last):", '  File "x", line 1\n', "[rank0]: ", "error: "])
def test_cut_off_output_is_survived(tail):
    """A stderr tail that starts or ends in the middle of a traceback still gives a reason."""
    assert "exit code 1" in failure_reason(tail, 1)


_FAILURE = ProcessFailure(
    rank=3,
    at=1.0,
    lines=("ValueError: bad shape", "group   role"),
    frames=('File "/code/train.py", line 30, in <module>: main()', 'File "/code/model.py", line 12, in forward'),
)


def of_process(own, exit_code=1, stderr_tail=_PEER, place=_PLACE):
    """The failure of a process that reports why it failed."""
    return script_failure(EndedProcess(7, 3, exit_code, 2.0, own, has_reporter=True), 1, stderr_tail, place)


def test_the_reason_is_what_the_process_said():
    """A process's failure report determines the reason, whatever is on stderr: exception, rank, then frames."""
    failed = of_process(_FAILURE)
    assert failed.reason.text.splitlines() == [
        *_FAILURE.lines,
        "on trainer host algo-2, rank 3 (exit code 1)",
        _FAILURE.frames[1],
        _FAILURE.frames[0],
    ]
    place = "on trainer host algo-2, rank 3 (exit code 1)"
    assert failed.reason.headline == f"{_FAILURE.lines[0]} {_FAILURE.lines[1]} {place}"
    assert not any((failed.is_consequence, failed.is_permanent))
    other = of_process(replace(_FAILURE, is_consequence=True, is_permanent=True))
    assert other.is_consequence
    assert other.is_permanent


@pytest.mark.parametrize("tail", [_VALUE_ERROR, _VALUE_ERROR.replace("ValueError", "ImportError")])
def test_a_process_that_would_have_said_why_was_killed_or_exited(tail):
    """Without a failure report, the exit code is the reason; an exception in stderr is shown but never permanent."""
    killed = of_process(None, 137, tail)
    start = "killed by SIGKILL (exit code 137) on trainer host algo-2, rank 3; last lines of stderr:"
    assert killed.reason.text.startswith(start)
    assert killed.exit_code == 137
    exited = of_process(None, 1, tail)
    assert exited.reason.text.startswith("exit code 1 on trainer host algo-2, rank 3; last lines of stderr:")
    assert not any((killed.is_permanent, exited.is_permanent))
    assert of_process(None, 2, tail).is_permanent


def test_an_exception_on_a_data_host_names_the_trainer_that_it_ended():
    """The user's exception and the data host come first, then the trainer host that it ended, or just the exit code."""
    lines = ("ValueError: corrupt", "on data host algo-3, worker 0: index 40")
    own = replace(_FAILURE, lines=lines, is_passed_on=True)
    where = of_process(own).reason.text.splitlines()[:3]
    assert where == [*lines, "passed on to trainer host algo-2, rank 3 (exit code 1)"]
    assert of_process(own, place=Place("algo-3", Role.DATA)).reason.text.splitlines()[2] == "exit code 1"


@pytest.mark.parametrize(
    ("said", "code", "is_permanent"),
    [
        ("usage: train.py\ntrain.py: error: unrecognized arguments: --x\n", 2, True),
        ("", 143, True),
        ("", 130, True),
        (_VALUE_ERROR.replace("ValueError", "ModuleNotFoundError"), 1, True),
        ('  File "train.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n', 1, True),
        (_VALUE_ERROR.replace("ValueError", "ImportError") + _VALUE_ERROR, 1, False),
        (_VALUE_ERROR.replace("ValueError", "ImportError") + "step 100\n", 1, False),
        (_VALUE_ERROR.replace("ValueError", "ImportError"), 137, False),
        (_VALUE_ERROR, 1, False),
        ("", 1, False),
        ("", 7, False),
        ("out of memory\n", 134, False),
    ],
)
def test_what_would_recur_in_a_script_without_failure_file(said, code, is_permanent):
    """Usage errors, and import and syntax errors that ended the script, are permanent; those it caught are not."""
    assert of_script(said, code).is_permanent is is_permanent


@pytest.mark.parametrize(
    ("said", "is_one"), [("", False), (_VALUE_ERROR, False), (_PEER, True), (_PEER + "x\n", False)]
)
def test_what_follows_from_another_host(said, is_one):
    """A script that ends with a closed connection failed because of another host."""
    assert of_script(said, 1).is_consequence is is_one


def test_a_code_that_only_the_parent_knows():
    """The reason says so if only the parent, such as torchrun, knows the exit code because it reaped the rank first."""
    gone = EndedProcess(7, 1, None, 2.0, has_reporter=True)
    reason = script_failure(gone, 1, "x\n", _PLACE).reason.text
    assert (
        reason
        == "exited with a code that only its parent knows on trainer host algo-2, rank 1; last lines of stderr:\nx"
    )
