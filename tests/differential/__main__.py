"""Runs random scripts twice, by stock Lightning and with a data host, and prints what differs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer

from lightning_sm import DataHost, DataServiceSettings, RemoteDataModule
from tests.differential.cases import Case, case

_QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
}


class Data(LightningDataModule):
    """The loaders of the case whose number a file has.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def setup(self, stage: str) -> None:
        self.case = case(int(self.path.read_text()))

    def train_dataloader(self) -> Any:
        return self.case.train.make

    def val_dataloader(self) -> Any:
        return self.case.evaluation.make

    def test_dataloader(self) -> Any:
        return self.case.evaluation.make

    def predict_dataloader(self) -> Any:
        return self.case.evaluation.make


class Model(LightningModule):
    """Notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[Any]] = {}

    def note(self, stage: str, batch: Any, *where: int) -> None:
        """Note a batch of this epoch."""
        self.seen.setdefault(f"{stage} {self.current_epoch}", []).append([*where, plain(batch)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train", batch, batch_idx)
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("sanity" if self.trainer.sanity_checking else "val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("predict", batch, batch_idx, dataloader_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def plain(value: Any) -> Any:
    """A batch as values that can be compared, with their types."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, dict):
        return {"dict": {str(key): plain(part) for key, part in value.items()}}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [plain(part) for part in value]}
    return value


def run(module: Any, script: Case) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Fit, validate, test and predict; return the batches and the errors."""
    model = Model()
    trainer = Trainer(**_QUIET, **script.trainer)
    errors = {}
    for name in ("fit", "validate", "test", "predict"):
        try:
            getattr(trainer, name)(model, datamodule=module)
        except Exception as error:  # noqa: BLE001, PERF203  # both may fail; what differs is found later
            errors[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
    return model.seen, errors


def deviations(script: Case, stock: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs: what it is, and both values."""
    stock_seen, stock_errors = stock
    our_seen, our_errors = ours
    for name in ("fit", "validate", "test", "predict"):
        if (name in stock_errors) != (name in our_errors):
            yield f"{name}: one fails", stock_errors.get(name), our_errors.get(name)
    failed = {*stock_errors, *our_errors}
    for key in sorted({*stock_seen, *our_seen}):
        stage = key.split()[0]
        if {"train": "fit", "val": "fit", "sanity": "fit"}.get(stage, stage) in failed:
            continue
        described = script.train if stage == "train" else script.evaluation
        old, new = stock_seen.get(key, []), our_seen.get(key, [])
        is_ordered = described.is_ordered or (stage == "train" and "overfit_batches" in script.trainer)
        if stage == "predict" and any("torch's batch sampler" in str(word) for word in described.words):
            # Stock Lightning replaces the sampler in it by the order of the dataset: right here, wrong there.
            old, new = sorted(_leaves(old)), sorted(_leaves(new))
        if is_ordered and old != new:
            yield f"{stage}: batches", old, new
        elif not is_ordered:
            yield from _random_deviations(stage, described, script, old, new)


def _random_deviations(
    stage: str, described: Any, script: Case, old: list[Any], new: list[Any]
) -> Iterator[tuple[str, Any, Any]]:
    is_stream = any("stream" in word for word in described.words)
    limit = {"train": "limit_train_batches", "sanity": "num_sanity_val_steps"}.get(stage, f"limit_{stage}_batches")
    is_limited = limit in script.trainer or stage == "sanity" or "overfit_batches" in script.trainer
    # Batches of many sizes that the user's sampler has shuffled: only their number is the same.
    has_sizes = not any("own with random numbers" in str(word) for word in described.words)
    if not is_stream and len(old) != len(new):
        yield f"{stage}: number of batches", len(old), len(new)
    elif not is_stream and has_sizes and _shapes(old) != _shapes(new):
        yield f"{stage}: shapes of batches", _shapes(old), _shapes(new)
    elif described.is_complete and not is_limited and _leaves(old) != _leaves(new):
        yield f"{stage}: samples", _leaves(old), _leaves(new)


def _shapes(batches: list[Any]) -> list[Any]:
    """Everything but the values."""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(part) for key, part in value.items()}
        if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and "torch." in value[0]:
            return value[:2]
        return [shape(part) for part in value] if isinstance(value, list) else type(value).__name__

    return [[*batch[:-1], shape(batch[-1])] for batch in batches]


def _leaves(batches: list[Any]) -> list[str]:
    """All values, sorted: the samples, whatever batches they are in."""

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and "torch." in value[0]:
            value = value[2]
        if not isinstance(value, list):
            yield value
            return
        for part in value:
            yield from leaves(part)

    return sorted(str(leaf) for batch in batches for leaf in leaves(batch[-1]))


@contextmanager
def compared(num_workers: int = 2) -> Iterator[Any]:
    """Yield a function that runs a case twice and returns what differs."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case"
        with DataHost(Data(path), workers=num_workers) as host:
            module = RemoteDataModule(Data(path), [host.address], settings=DataServiceSettings(batch_timeout_s=60))
            module.closes_on_teardown = False  # as in a job; a feeder takes longer to start than a case to run

            def compare(number: int) -> tuple[Case, list[tuple[str, Any, Any]]]:
                path.write_text(str(number))
                torch.manual_seed(number)
                stock = run(Data(path), case(number))
                ours = run(module, case(number))
                return case(number), list(deviations(case(number), stock, ours))

            yield compare
            module.close()


def main() -> None:
    """Run cases, and print the deviations and a table of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args()
    table: Counter[str] = Counter()
    began = time.monotonic()
    with compared() as compare:
        for number in range(args.first, args.first + args.cases):
            script, found = compare(number)
            if found:
                sys.stdout.write(f"case {number}: {script.words}\n")
            for what, stock, ours in found:
                table[what] += 1
                sys.stdout.write(f"  {what}\n    stock: {_short(stock)}\n    ours:  {_short(ours)}\n")
            table["cases with a deviation" if found else "cases without a deviation"] += 1
            sys.stdout.flush()
    sys.stdout.write(json.dumps({**table, "seconds": round(time.monotonic() - began)}, indent=1) + "\n")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 700 else f"{text[:350]} ... {text[-350:]}"


if __name__ == "__main__":
    main()
