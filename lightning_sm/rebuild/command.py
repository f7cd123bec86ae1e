"""The command line of ``lightning-sm replay``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lightning_sm._arguments import positive_whole_number, whole_number
from lightning_sm._text import count, for_terminal
from lightning_sm.rebuild.recorded_step import RecordedStep, find_step
from lightning_sm.record.runs import read_run

EXAMPLES = """\
examples:
  rebuild the batch of step 18432 with the script and the arguments of the run:
    lightning-sm replay outputs/local-20260102-030405-abcd --step 18432
  with another folder of the data, that of rank 3, into a file of another name:
    lightning-sm replay output.tar.gz --step 18432 --rank 3 -o spike.pt -- train.py fit --data.data_dir=/data
  only list the samples, which needs neither data nor script:
    lightning-sm replay checkpoints/ --step 18432 --samples

exit codes: 0 the batches are those of the run, bit for bit (--samples: they are listed), 1 they are not, 2 the record
or the script lacks what is needed"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``replay`` to the parser of its subcommand."""
    parser.add_argument("run", type=Path, metavar="DIR", help="folder or output.tar.gz of a run")
    parser.add_argument(
        "--step", type=whole_number, required=True, metavar="N", help="the step as loggers count it, from 0"
    )
    parser.add_argument("--rank", type=whole_number, default=0, metavar="R", help="the rank (default: 0)")
    parser.add_argument(
        "--epoch", type=positive_whole_number, metavar="E", help="the epoch, from 1, where the step is in several"
    )
    parser.add_argument(
        "--attempt",
        type=positive_whole_number,
        metavar="A",
        help="the attempt, from 1 (default: the last one that trained on the step)",
    )
    parser.add_argument("--fit", metavar="NAME", help="the fit of the script, where several have the step")
    parser.add_argument("--samples", action="store_true", help="only list the samples, without data and script")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file for the batches (default: step-N-rank-R.pt)"
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of sentences")
    parser.add_argument("--job", metavar="NAME", help="the only job to read, where a folder has the records of several")
    parser.add_argument(
        "command",
        nargs="*",
        metavar="-- SCRIPT [ARGS]",
        help="the script and its arguments (default: those of the run)",
    )


def main(options: argparse.Namespace) -> int:
    """List the samples of a step, and build its batches again unless only the samples are wanted.

    Raises:
        LightningSMError: The record cannot be read, or it or the script lacks what is needed.
    """
    from lightning_sm.rebuild.run import USUAL_CAUSES, rebuild  # noqa: PLC0415 - with the next: load NumPy
    from lightning_sm.rebuild.samples import local_samples, samples_of  # noqa: PLC0415

    step = find_step(
        read_run(options.run, options.job, with_batches=True),
        options.step,
        rank=options.rank,
        epoch=None if options.epoch is None else options.epoch - 1,
        attempt=options.attempt,
        fit=options.fit,
    )
    found = _as_json(step)
    if options.samples:
        if all(step.batches):
            found["batches"] = [[samples_of(batch) for batch in of_batch] for of_batch in step.batches]
        else:
            found["batches"] = local_samples(step)
        _print(found, [], as_json=options.json)
        return 0
    output = options.output or Path(f"step-{step.step}-rank-{step.rank}.pt")
    rebuilt = rebuild(step, output, options.command)
    found["batches"] = [
        [
            {
                "loader": one.recorded.begun.loader,
                **_place(one.recorded.shard, one.rebuilt.position, one.rebuilt.indices),
                "hash": f"{one.rebuilt.content_hash:016x}",
                "recorded_hash": f"{one.recorded.content_hash:016x}",
            }
            for one in of_batch
        ]
        for of_batch in rebuilt.batches
    ]
    found |= {"equal": rebuilt.is_equal, "output": str(rebuilt.output), "notes": [*found["notes"], *rebuilt.notes]}
    if rebuilt.is_equal:
        verdict = [f"Equal to the run, bit for bit. Written to {rebuilt.output} (torch.load)."]
    else:
        verdict = [f"NOT what the run trained on. What was built is in {rebuilt.output}. {USUAL_CAUSES}"]
    _print(found, verdict, as_json=options.json)
    return 0 if rebuilt.is_equal else 1


def _place(shard: tuple[int, int] | None, position: int, indices: list[int]) -> dict[str, Any]:
    if shard is not None:
        return {"shard": shard[0], "batch_of_shard": shard[1]}
    return {"position": position, "indices": indices}


def _as_json(step: RecordedStep) -> dict[str, Any]:
    return {
        "run": step.run,
        "step": step.step,
        "rank": step.rank,
        "attempt": step.attempt,
        "fit": step.fit,
        "epoch": step.epoch + 1,
        "batches_of_epoch": list(step.numbers),
        "notes": list(step.notes),
    }


def _print(found: dict[str, Any], verdict: list[str], *, as_json: bool) -> None:
    text = json.dumps(found, indent=2) if as_json else "\n".join([*_sentences(found), *verdict])
    sys.stdout.write(for_terminal(f"{text}\n", sys.stdout))


def _sentences(found: dict[str, Any]) -> list[str]:
    numbers = found["batches_of_epoch"]
    which = f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {numbers[0]} to {numbers[-1]}"
    lines = [
        f"{found['run']}: step {found['step']} of rank {found['rank']} is {which} of epoch {found['epoch']} "
        f"(attempt {found['attempt']}, fit {found['fit']})."
    ]
    for of_batch in found["batches"]:
        for one in of_batch:
            if "shard" in one:
                samples = f"batch {one['batch_of_shard']} of virtual shard {one['shard']}"
            else:
                indices = one["indices"]
                listed = ", ".join(map(str, indices))
                samples = f"{count(len(indices), 'sample')} from position {one['position']} on: {listed}"
            lines.append(f"  {one['loader']}: {samples}")
            if "hash" in one and one["hash"] != one["recorded_hash"]:
                lines.append(f"  DIFFERENT: its hash is {one['hash']}, that of the run {one['recorded_hash']}")
    return [*lines, *(f"  note: {note}" for note in found["notes"])]
