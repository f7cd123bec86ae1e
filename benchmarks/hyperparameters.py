"""How many values survive the way from the SDK to the training script: the stock toolkits' command line against ours.

Each value travels alone, beside one plain string, as hyperparameter of a job. The stock ways are the real code of
sagemaker-training (SDK v2) and the documented rule of SDK v3's drivers; the script's end is a real jsonargparse parser
with an argument of the value's own type.

    python benchmarks/hyperparameters.py
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from tabulate import tabulate

from lightning_sm.job.hyperparameters import to_argv

# name: (option, type of the argument, value)
CORPUS: dict[str, tuple[str, Any, Any]] = {
    "bool true": ("flag", bool, True),
    "bool false": ("flag", bool, False),
    "None": ("limit", int | None, None),
    "int": ("epochs", int, 3),
    "negative int": ("devices", int, -1),
    "float": ("lr", float, 0.001),
    "tiny float": ("lr", float, 1e-7),
    "string": ("text", str, "resnet"),
    "string with spaces": ("text", str, "a b  c"),
    "empty string": ("text", str, ""),
    "string of digits": ("text", str, "007"),
    "string like a float": ("text", str, "1e-3"),
    "string like a bool": ("text", str, "true"),
    "string with quotes": ("text", str, 'it\'s "quoted"'),
    "string with leading dashes": ("text", str, "--not-an-option"),
    "unicode": ("text", str, "größe 模型 🚀"),
    "list of int": ("sizes", list[int], [1, 2, 3]),
    "list of str": ("names", list[str], ["a b", "7", "true"]),
    "empty list": ("sizes", list[int], []),
    "dict": ("table", dict, {"a": 1, "b": 2}),
    "dict of dict": ("table", dict, {"a": {"b": [1, None, True]}, "c": "x y"}),
    "empty dict": ("table", dict, {}),
    "dotted key": ("data.batch_size", int, 32),
    "one-letter key": ("b", int, 4),
    "toolkit key beside it": ("epochs", int, 3),
    "tuning key beside it": ("epochs", int, 3),
}
EXTRA = {
    "toolkit key beside it": {"mp_parameters": {"partitions": 2}},
    "tuning key beside it": {"_tuning_objective_metric": "loss"},
}


def v2_generic(value: Any) -> str:
    """SDK v2, ``Estimator(image_uri=...)``: ``str`` of each value."""
    return str(value)


def v2_framework(value: Any) -> str:
    """SDK v2, framework estimators and ``source_dir``: JSON of each value."""
    return json.dumps(value)


def v3(value: Any) -> str:
    """SDK v3, ``ModelTrainer``: strings as they are, JSON of all else."""
    return value if isinstance(value, str) else json.dumps(value)


def stock_v2(hyperparameters: Mapping[str, str], folder: Path) -> list[str]:
    """The command line of sagemaker-training, by its own code."""
    from sagemaker_training import environment, mapping

    (folder / "input" / "config" / "hyperparameters.json").write_text(json.dumps(hyperparameters))
    decoded = environment.read_hyperparameters()
    own = {"_tuning_objective_metric", "default_user_module_name"}
    kept = {key: value for key, value in decoded.items() if not key.startswith("sagemaker_") and key not in own}
    return [str(argument) for argument in mapping.to_cmd_args(kept)]


def stock_v3(hyperparameters: Mapping[str, str], _folder: Path) -> list[str]:
    """The command line of SDK v3's drivers: ``--key value`` for each, without a filter."""
    return [part for key, value in hyperparameters.items() for part in (f"--{key}", value)]


def ours(hyperparameters: Mapping[str, str], _folder: Path) -> list[str]:
    """The command line of ``lightning-sm train`` and ``SageMakerCLI``."""
    return to_argv(hyperparameters)


def survives(name: str, encode: Callable[[Any], str], render: Callable[..., list[str]], folder: Path) -> bool:
    """Whether a value arrives as it was sent."""
    key, kind, value = CORPUS[name]
    hyperparameters = {key: encode(value), "note": encode("a b")}
    hyperparameters |= {extra: encode(item) for extra, item in EXTRA.get(name, {}).items()}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{key}", type=kind)
    parser.add_argument("--note", type=str)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            parsed = parser.parse_args(render(hyperparameters, folder))
    except (Exception, SystemExit):  # noqa: BLE001 - whatever it is, the script would not start
        return False
    arrived = parsed[key]
    arrived = arrived.as_dict() if hasattr(arrived, "as_dict") else arrived
    return bool(arrived == value and type(arrived) is type(value) and parsed["note"] == "a b")


def main() -> None:
    """Print a table of what survives."""
    routes = [
        ("SDK v2 generic", v2_generic, stock_v2),
        ("SDK v2 framework", v2_framework, stock_v2),
        ("SDK v3", v3, stock_v3),
    ]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "input" / "config").mkdir(parents=True)
        os.environ["SAGEMAKER_BASE_DIR"] = folder  # sagemaker-training reads it when it is imported
        rows, lost = [], []
        for title, encode, stock in routes:
            row = [title]
            for render in (stock, ours):
                failed = [name for name in CORPUS if not survives(name, encode, render, Path(folder))]
                row.append(f"{len(CORPUS) - len(failed)} of {len(CORPUS)}")
                lost.append([title, "ours" if render is ours else "stock", ", ".join(failed) or "-"])
            rows.append(row)
    sys.stdout.write(tabulate(rows, headers=["route", "stock toolkit", "lightning_sm"]) + "\n\n")
    sys.stdout.write(tabulate(lost, headers=["route", "command line", "lost"]) + "\n")


if __name__ == "__main__":
    main()
