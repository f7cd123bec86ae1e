"""The reason of a failure: the real exception first, in at most 1024 characters."""

from __future__ import annotations

import signal
import traceback

import pytest

from lightning_sm.errors import ScriptError
from lightning_sm.job.stopping import Reason
from lightning_sm.job.topology import Role
from lightning_sm.launcher import failure
from lightning_sm.launcher.failure import Place, error_reason, is_consequence, script_reason

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
_NCCL = """\
Traceback (most recent call last):
  File "/code/train.py", line 30, in <module>
    main()
torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:275, NCCL 2.27.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer
"""


def failure_reason(stderr_tail, exit_code, place=_PLACE):
    """The reason on the second of two trainer hosts with one process each."""
    return failure.failure_reason(stderr_tail, exit_code, place).text


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
    """The exception opens the reason, host and rank follow; library frames are left out between the user's."""
    assert failure_reason("Epoch 0 starts\n" + _VALUE_ERROR, 1).split("\n") == [
        "ValueError: bad shape",
        "on trainer host algo-2, rank 1 (exit code 1)",
        'File "/code/model.py", line 12, in forward: raise ValueError("bad shape")',
        'File "/code/train.py", line 30, in <module>: main()',
    ]


def test_a_rank_that_printed_its_number_is_named():
    """Of a host with several processes, the rank is that of the traceback; without one it is left out."""
    place = Place("algo-1", Role.TRAINER)
    prefixed = "".join(f"[rank13]: {line}\n" for line in _VALUE_ERROR.splitlines())
    assert failure_reason(prefixed, 1, place).splitlines()[1] == "on trainer host algo-1, rank 13 (exit code 1)"
    assert failure_reason(_VALUE_ERROR, 1, place).splitlines()[1] == "on trainer host algo-1 (exit code 1)"


def test_a_data_host_has_no_rank_and_its_restarts_are_counted():
    """The user's error comes first also where the script was restarted before."""
    reason = script_reason(_VALUE_ERROR, 1, Place("algo-3", Role.DATA), num_restarts=2)
    assert reason.text.splitlines()[:2] == [
        "ValueError: bad shape",
        "on data host algo-3 (exit code 1, restarted 2 times)",
    ]
    once = script_reason("", 137, Place("algo-3", Role.DATA), num_restarts=1)
    assert once.text.startswith("killed by SIGKILL (exit code 137, restarted once) on data host algo-3; nothing was")


def test_an_error_before_the_script_starts_names_the_host():
    """What the launcher itself could not do is the reason, on this host."""
    place = Place("algo-3", Role.DATA)
    assert error_reason(ScriptError("no such script."), place) == "ScriptError: no such script.\non data host algo-3"
    assert error_reason(ScriptError("no such script."), None) == "ScriptError: no such script."
    assert error_reason(KeyError("x"), place).startswith("The launcher failed: KeyError: 'x'\n")


_REMOTE = """Traceback (most recent call last):
  File "/code/train.py", line 30, in <module>
    SageMakerCLI(Model, Data)
  File "/venv/lib/python3.11/site-packages/pytorch_lightning/trainer.py", line 500, in fit
    self._run(model)
lightning_sm.errors.RemoteTransformError: ValueError: sample 40 is corrupt: img_40.jpg
on data host algo-3 (127.0.0.4:27184), worker 0: index 40, batch of step 5
Traceback (most recent call last):
  File "/src/lightning_sm/data/host/loader.py", line 185, in _samples
    samples.append(self._dataset[key])
  File "/code/images.py", line 9, in __getitem__
    raise ValueError(f"sample {i} is corrupt: img_{i}.jpg")
ValueError: sample 40 is corrupt: img_40.jpg
"""


def test_an_error_on_a_data_host_is_the_users_own_from_there():
    """The reason of the trainer is the user's exception, with sample, data host and frames; not how it travelled."""
    assert failure_reason(_REMOTE, 1).split("\n") == [
        "ValueError: sample 40 is corrupt: img_40.jpg",
        "on data host algo-3 (127.0.0.4:27184), worker 0: index 40, batch of step 5",
        "passed on to trainer host algo-2, rank 1 (exit code 1)",
        'File "/code/images.py", line 9, in __getitem__: raise ValueError(f"sample {i} is corrupt: img_{i}.jpg")',
    ]
    of_data_host = failure_reason(_REMOTE, 1, Place("algo-3", Role.DATA)).splitlines()
    assert of_data_host[:1] + of_data_host[2:3] == ["ValueError: sample 40 is corrupt: img_40.jpg", "exit code 1"]


def test_frames_of_lightning_sm_are_not_the_users():
    """A library installed from a checkout is a library all the same; its own errors do not show where they arose."""
    tail = _VALUE_ERROR.replace("/venv/lib/python3.11/site-packages/pytorch_lightning", "/src/lightning_sm/training")
    assert "lightning_sm" not in failure_reason(tail, 1)
    tail = _VALUE_ERROR.replace("/code/model.py", "/src/lightning_sm/data/trainer/feeder_client.py")
    assert "feeder_client.py" in failure_reason(tail, 1)
    reason = failure_reason(tail.replace("ValueError: ", "lightning_sm.errors.DataTimeoutError: "), 1)
    assert reason.splitlines()[2:] == ['File "/code/train.py", line 30, in <module>: main()']


def test_real_interpreter_output_is_understood():
    """What this Python version prints for an uncaught exception gives the exception and its line."""
    reason = failure_reason(_printed("def f():\n    return 1 / 0\nf()"), 1)
    place = "on trainer host algo-2, rank 1 (exit code 1)"
    assert reason.startswith(f'ZeroDivisionError: division by zero\n{place}\nFile "/code/train.py", line 2, in f')


def test_raising_frame_in_a_library_is_kept():
    """The frame that raised is named even where it is not the user's."""
    tail = _VALUE_ERROR.replace("/code/model.py", "/venv/lib/python3.11/site-packages/torch/nn.py")
    assert "site-packages/torch/nn.py" in failure_reason(tail, 1)


@pytest.mark.parametrize("consequence", [_PEER, _PEER.replace("RuntimeError", "BrokenPipeError")])
def test_first_exception_that_is_no_consequence_wins(consequence):
    """Of several ranks' exceptions the reason is the first that no other rank caused, wherever it stands."""
    other = _VALUE_ERROR.replace("ValueError: bad shape", "KeyError: 'later'")
    assert failure_reason(consequence + _VALUE_ERROR + other, 1).startswith("ValueError: bad shape\n")


def test_consequence_is_the_reason_when_there_is_nothing_else():
    """A lone "connection closed by peer" opens the reason, unless the script was killed."""
    assert failure_reason(_PEER + "bye\n", 1).startswith("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection")
    assert failure_reason(_PEER + "Segmentation fault\n", 139).startswith(
        "killed by SIGSEGV (exit code 139) on trainer"
    )


def test_rank_prefixes_and_progress_bars_do_not_hide_a_traceback():
    """The prefixes of torch.distributed and an unfinished progress bar are stripped."""
    prefixed = "".join(f"[rank1]: {line}\n" for line in _VALUE_ERROR.splitlines())
    reason = failure_reason("Epoch 0:  50%|###   | 1/2\rEpoch 0:  50%|###   | 1/2" + prefixed, 1)
    assert reason.startswith("ValueError: bad shape\non trainer host algo-2, rank 1 (exit code 1)\n")
    assert reason.splitlines()[2].startswith('File "/code/model.py", line 12')


def test_interleaved_ranks_are_told_apart_by_their_prefix():
    """Two ranks that print line by line in turn give the frames of the first one only."""
    first = [f"[rank0]: {line}" for line in _VALUE_ERROR.splitlines()]
    second = [f"[rank1]: {line.replace('/code', '/other')}" for line in _VALUE_ERROR.splitlines()]
    tail = "\n".join(line for pair in zip(first, second, strict=True) for line in pair)
    reason = failure_reason(tail, 1)
    assert reason.startswith("ValueError: bad shape\n")
    assert "/other" not in reason


def test_last_exception_of_a_chain_is_the_reason():
    """``raise X from Y`` gives X, as Python prints it last."""
    reason = failure_reason(_printed("try:\n  {}['a']\nexcept KeyError as e:\n  raise RuntimeError('no a') from e"), 1)
    assert reason.startswith("RuntimeError: no a\n")


def test_exception_of_a_worker_process_is_preferred_to_its_messenger():
    """A DataLoader worker's own exception comes before the one that carried it over."""
    tail = (
        'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    next(loader)\n'
        "RuntimeError: Caught OSError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "/code/data.py", line 7, in __getitem__\n'
        "    open(path)\nOSError: no such image\n"
    )
    reason = failure_reason(tail, 1).splitlines()
    assert (reason[0], reason[2][:28]) == ("OSError: no such image", 'File "/code/data.py", line 7')


def test_exceptions_that_python_ignored_are_no_reason():
    """An exception in ``__del__`` does not hide the one that ended the script."""
    ignored = "Exception ignored in: <function X.__del__>\n" + _VALUE_ERROR.replace("bad shape", "in del")
    assert failure_reason(ignored + "\n" + _VALUE_ERROR, 1).startswith("ValueError: bad shape")


def test_message_of_several_lines_is_kept():
    """A table in the message is part of the reason."""
    reason = failure_reason(_VALUE_ERROR + "group    role\n-------  ----\ngpu      trainer\n", 1)
    assert reason.startswith("ValueError: bad shape\ngroup    role\n-------  ----\ngpu      trainer\non trainer host")


def test_usage_error_is_the_error_line():
    """Of argparse's and jsonargparse's usage texts only the error is kept."""
    usage = "usage: train.py [-h] [--a A]\n               {fit} ...\n"
    assert failure_reason(f"{usage}train.py: error: unrecognized arguments: --b=1\n", 2).startswith(
        "train.py: error: unrecognized arguments: --b=1\n"
    )
    tip = "tip: For details of accepted options run: train.py fit --help\n"
    assert failure_reason(f"{usage}{tip}error: Parser key 'x':\n  Not a valid int\n", 2).startswith(
        "error: Parser key 'x':\n  Not a valid int\n"
    )


def test_a_usage_error_keeps_what_stands_behind_an_empty_line():
    """Behind one, jsonargparse explains an ambiguous class; what other processes print is not part of it."""
    explained = (
        'error: Parser key "data":\n\n  - Does not validate against any of the Union subtypes\n  Errors:\n'
        "    - Multiple subclasses with name Data. Give the full class path to avoid ambiguity: a.Data, b.Data.\n"
        "  Given value: Data\n"
    )
    usage = "usage: train.py [-h] [--a A]\ntip: run: train.py --help\n"
    for tail in (usage + explained, (usage + explained) * 2, usage + explained + _VALUE_ERROR):
        assert failure_reason(tail, 2).splitlines() == [
            *(line for line in explained.splitlines() if line),
            "on trainer host algo-2, rank 1 (exit code 2)",
        ]


def test_syntax_error_names_file_and_line():
    """A script that does not compile gives the error, the file and the line."""
    reason = failure_reason(_printed("x = 1\ndef f(:\n"), 1)
    assert reason.startswith("SyntaxError: invalid syntax")
    assert 'File "/code/train.py", line 2' in reason


@pytest.mark.parametrize(("code", "name"), [(137, "SIGKILL"), (139, "SIGSEGV"), (143, "SIGTERM")])
def test_signal_is_named(code, name):
    """A killed script gives the name of the signal and what it wrote last."""
    reason = failure_reason("epoch 3 of 10\n", code)
    assert reason.startswith(f"killed by {name} (exit code {code})")
    assert reason.endswith("epoch 3 of 10")


def test_silent_failure_is_a_plain_sentence():
    """Without a word on stderr the exit code is all there is."""
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
    """Long messages, lines and outputs are cut to 1024 characters, and something remains."""
    assert 10 < len(failure_reason(tail, 1)) <= 1024
    assert "exit code 1" in failure_reason(tail, 1)


def test_the_headline_of_last_lines_is_the_very_last():
    """Of an exception it is the first line and the place; a stop comes before either."""
    place = Place("algo-1", Role.TRAINER)
    where = "exit code 3 on trainer host algo-1; last lines of stderr:"
    assert script_reason("a warning\nno data\n", 3, place) == Reason(f"{where}\na warning\nno data", f"{where} no data")
    stopped = script_reason(_VALUE_ERROR, 1, place, stopped_by=signal.SIGTERM)
    stop = "The job was stopped or interrupted (SIGTERM). "
    assert stopped.headline == f"{stop}ValueError: bad shape on trainer host algo-1 (exit code 1)"


@pytest.mark.parametrize("tail", ["Traceback (most recent call last):", '  File "x", line 1\n', "[rank0]: ", "error: "])
def test_cut_off_output_is_survived(tail):
    """A tail that begins or ends in the middle of a traceback still gives a reason."""
    assert "exit code 1" in failure_reason(tail, 1)


@pytest.mark.parametrize(
    ("said", "is_one"),
    [
        ("", False),
        ("no traceback at all\n", False),
        (_VALUE_ERROR, False),
        (_PEER, True),
        (_PEER + _VALUE_ERROR, False),
        (_NCCL, True),
        (_NCCL + _VALUE_ERROR, False),
        (_VALUE_ERROR.replace("bad shape", "one line\nand one about SIGTERM"), False),
    ],
)
def test_what_follows_from_another_host(said, is_one):
    """A script that says nothing but that connections were closed is not what failed first."""
    assert is_consequence(said) is is_one
