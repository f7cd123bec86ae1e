"""What differs between the files that two runs saved."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from lightning_sm.chaos.models import differences

JOBS = ("local-20260102-030405-abcd", "local-20260102-030506-0123")


@pytest.fixture
def runs(tmp_path):
    """The folders of two runs' models."""
    folders = [tmp_path / name / "model" for name in ("undisturbed-1", "draw-1")]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def save(folder, **values):
    """Save a checkpoint."""
    torch.save(values, folder / "model.ckpt")


def test_equal_values_are_no_difference(runs):
    """NaN, sparse and complex tensors included, and whatever pickles to the same bytes."""
    for folder in runs:
        save(
            folder,
            state_dict={
                "weight": torch.tensor([1.0, float("nan")]),
                "sparse": torch.eye(2).to_sparse(),
                "complex": torch.ones(2, dtype=torch.complex64),
            },
            loss=float("nan"),
            hyper_parameters=Namespace(rate=0.5),
        )
        (folder / "notes.txt").write_text("the same")
    assert differences(*runs) == {}


def test_a_tensor_that_differs_in_one_bit_is_named_with_the_distance(runs):
    """By its place in the file, absolutely and relative to its largest value."""
    for folder, offset in zip(runs, (0.0, 2**-20), strict=True):
        save(folder, state_dict={"a.weight": torch.tensor([4.0, 1.0 + offset]), "b": torch.ones(1)})
    ((key, found),) = differences(*runs).items()
    assert key == "model.ckpt state_dict.a.weight"
    assert found.text == "differs by up to 9.5e-07 (2e-07 of its largest value)"
    assert found.size == pytest.approx(2**-22)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 2),
        (1, 1.0),
        (None, 0),
        ([1, 2], [1]),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(1), torch.ones(1).half()),
        (torch.ones(1), 1.0),
        (Namespace(rate=0.5), Namespace(rate=0.25)),
        (float("nan"), 0.0),
        (torch.tensor([float("nan")]), torch.zeros(1)),
    ],
)
def test_other_values_shapes_types_and_missing_keys_differ(runs, value, other):
    """Nothing of a checkpoint counts as equal because it is of another type or missing."""
    save(runs[0], state={"x": value, "y": 1})
    save(runs[1], state={"x": other, "y": 1})
    found = differences(*runs)
    assert found
    assert all(key.startswith("model.ckpt state.x") for key in found)
    assert all(one.size > 0 and not one.is_missing for one in found.values())


def test_names_of_runs_jobs_and_hosts_do_not_count(runs):
    """A checkpoint and a configuration name files of their run, and hosts are assigned at random."""
    for folder, job, host in zip(runs, JOBS, ("algo-1", "algo-2"), strict=True):
        path = f"{folder.parent}/{job}/ml/checkpoints/last.ckpt"
        save(folder, callbacks={"best_k_models": {path: 0.5}, "best_model_path": path})
        (folder / "config.yaml").write_text(f"save_dir: {path}\nroot: {folder.parent}/{job}/ml/output/{host}\n")
    assert differences(*runs) == {}


def test_other_files_and_files_of_one_run_only_differ(runs):
    """Files that torch has not saved are compared by their bytes."""
    for folder, content in zip(runs, (b"\0\1", b"\0\2"), strict=True):
        (folder / "weights.onnx").write_bytes(content)
        (folder / "broken.pt").write_bytes(content)
    (runs[0] / "only.txt").touch()
    assert set(differences(*runs)) == {"weights.onnx", "broken.pt", "only.txt"}


def test_a_text_is_compared_by_lines(runs):
    """The first line that differs is shown, or the values of a single one."""
    for folder, word in zip(runs, ("one", "two"), strict=True):
        (folder / "long.csv").write_text(f"step,loss\n1,0.5\n2,{word}\n")
        (folder / "short.txt").write_text(word)
    assert {key: one.text for key, one in differences(*runs).items()} == {
        "long.csv": "line 3 is '2,two' instead of '2,one'",
        "short.txt": "'two' instead of 'one'",
    }


def test_files_are_found_by_names_without_those_of_their_job(runs):
    """A logger's folder has the name of the job."""
    for folder, job in zip(runs, JOBS, strict=True):
        (folder / "logs" / job).mkdir(parents=True)
        (folder / "logs" / job / "hparams.yaml").write_text("rate: 1\n")
    assert differences(*runs) == {}


@pytest.mark.parametrize("content", [bytes(4096) + b"1" * 4096, b"", b"\x80\x04K\x01.", b"PK\x03\x04"])
def test_whatever_torch_makes_of_a_file_it_is_compared(runs, content):
    """Zeros look like an empty archive of an old format, and others like half of a new one."""
    for folder in runs:
        (folder / "table.bin").write_bytes(content)
    assert differences(*runs) == {}
    (runs[1] / "table.bin").write_bytes(content + b"2")
    assert [*differences(*runs)] == ["table.bin"]


def test_classes_of_the_script_need_not_be_importable(runs, tmp_path):
    """A checkpoint that cannot be loaded here is compared by its bytes, without the names in it."""
    script = tmp_path / "save.py"
    script.write_text(
        "import sys, torch\nclass Mine: pass\ntorch.save({'a': Mine(), 'b': torch.ones(2)}, sys.argv[1])\n"
    )
    for folder in runs:
        subprocess.run([sys.executable, str(script), str(folder / "model.ckpt")], check=True)
    assert differences(*runs) == {}
    save(runs[1], a=1)
    assert differences(*runs)


def test_the_process_writes_json(runs):
    """With infinity for what has no size."""
    (runs[0] / "only.txt").touch()
    done = subprocess.run(
        [sys.executable, "-m", "lightning_sm.chaos.models", *map(str, runs)], capture_output=True, text=True, check=True
    )
    ((key, one),) = json.loads(done.stdout).items()
    assert key == "only.txt"
    assert one["is_missing"]
    assert one["size"] == float("inf")
