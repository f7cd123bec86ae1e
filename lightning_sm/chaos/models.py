"""Whether two runs have saved the same models: a process of its own, because it loads torch.

``python -m lightning_sm.chaos.models REFERENCE OTHER`` writes, as JSON, what differs: by file and key, how.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning_sm.chaos.judge import Difference

# The names of an emulated job, and of its hosts, which are assigned at random.
_NAMES = re.compile(r"local-\d{8}-\d{6}-[0-9a-f]{4}|algo-\d+")
_MAX_TEXT_BYTES = 10**6
_WEIGHTS = "state_dict."
_SAVED_BY_TORCH = frozenset({".bin", ".ckpt", ".pt", ".pth"})


def differences(reference: Path, other: Path) -> dict[str, Difference]:
    """Compare the files of two folders.

    Args:
        reference: One folder.
        other: The other.

    Returns:
        What differs, by file and key.
    """
    found: dict[str, Difference] = {}
    # Files and their paths name their run.
    runs = [str(folder.parent) for folder in (reference, other)]
    files = [
        {_unnamed(path.relative_to(folder).as_posix(), run): path for path in folder.rglob("*") if path.is_file()}
        for folder, run in zip((reference, other), runs, strict=True)
    ]
    for name in sorted({*files[0], *files[1]}):
        paths = [one[name] for one in files if name in one]
        if len(paths) < len(files):
            found[name] = Difference(f"only one of the runs has it: {paths[0]}", is_missing=True)
            continue
        values, other_values = (_contents(path, run) for path, run in zip(paths, runs, strict=True))
        for key in sorted(values.keys() | other_values.keys(), key=_rank):
            differs = _difference(values.get(key), other_values.get(key))
            if differs is not None:
                found[f"{name} {key}".strip()] = differs
    return found


def _rank(key: str) -> tuple[int, str]:
    """Weights come first: they say more than what is saved with them."""
    return (0 if key.startswith(_WEIGHTS) else 1), key


def _contents(path: Path, run: str) -> dict[str, Any]:
    """Return the values of a file by their keys: tensors, numbers and texts, or digests of anything else."""
    if path.suffix in _SAVED_BY_TORCH and find_spec("torch") is not None:
        import torch  # noqa: PLC0415 - a job's containers may have it, and this machine not

        try:
            # A file that the user's own script has just written here.
            loaded = torch.load(path, map_location="cpu", weights_only=False)
            return {_unnamed(key, run): _unnamed(value, run) for key, value in _leaves(loaded)}
        except Exception:  # noqa: BLE001, S110 - not torch's, or of classes that only the script has: compare its bytes
            pass
    if zipfile.is_zipfile(path):
        # Without the names, which are those of the file that was saved first.
        with zipfile.ZipFile(path) as archive:
            return {member.filename.partition("/")[2]: member.CRC for member in archive.infolist()}
    if path.stat().st_size <= _MAX_TEXT_BYTES:
        try:
            return {"": _unnamed(path.read_text(encoding="utf-8"), run)}
        except UnicodeDecodeError:
            pass
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while part := file.read(_MAX_TEXT_BYTES):
            digest.update(part)
    return {"": digest.digest()}


def _unnamed(value: Any, run: str) -> Any:
    """Return a text without the names of its run, job and hosts."""
    return _NAMES.sub("NAME", value.replace(run, "RUN")) if isinstance(value, str) else value


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, f"{key}.{name}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{key}.{index}".lstrip("."))
    elif value is None or isinstance(value, (str, bytes, bool, int, float)) or hasattr(value, "detach"):
        yield key, value
    else:
        try:
            yield key, hashlib.blake2b(pickle.dumps(value)).digest()
        except (pickle.PicklingError, TypeError, AttributeError):
            return  # nothing that a file could hold in two ways


def _difference(value: Any, other: Any) -> Difference | None:
    if hasattr(value, "detach") and hasattr(other, "detach"):
        return _difference_of_tensors(value, other)
    if type(value) is type(other) and (value == other or (value != value and other != other)):  # noqa: PLR0124 - NaN
        return None
    if isinstance(value, bytes) and isinstance(other, bytes):
        return Difference("has other bytes")
    if isinstance(value, str) and isinstance(other, str):
        lines, other_lines = value.splitlines(), other.splitlines()
        pairs = enumerate(zip_longest(lines, other_lines, fillvalue=""), 1)
        number, (line, other_line) = next((one for one in pairs if one[1][0] != one[1][1]), (1, (value, other)))
        where = f"line {number} is " if max(len(lines), len(other_lines)) > 1 else ""
        return Difference(f"{where}{_shown(other_line)} instead of {_shown(line)}")
    return Difference(f"{_shown(other)} instead of {_shown(value)}")


def _difference_of_tensors(value: Any, other: Any) -> Difference | None:
    if (value.dtype, value.shape) != (other.dtype, other.shape):
        return Difference(
            f"{other.dtype} of shape {tuple(other.shape)} instead of {value.dtype} of shape {tuple(value.shape)}"
        )
    import torch  # noqa: PLC0415 - as above

    both = [tensor.dequantize() if tensor.is_quantized else tensor.to_dense() for tensor in (value, other)]
    both = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in both]
    numbers = [torch.nan_to_num(tensor.double()) for tensor in both]
    if not torch.equal(*map(torch.isnan, both)):
        return Difference("has NaN in other places")
    # Whole numbers above 2**53 may be the same only as floating-point numbers.
    if torch.equal(*both) or (torch.equal(*numbers) and both[0].is_floating_point()):
        return None
    largest = float((numbers[0] - numbers[1]).abs().max())
    relative = largest / max(float(numbers[0].abs().max()), sys.float_info.min)
    return Difference(f"differs by up to {largest:.2g} ({relative:.1g} of its largest value)", relative)


def _shown(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "detach") else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004


if __name__ == "__main__":
    found = differences(Path(sys.argv[1]), Path(sys.argv[2]))
    json.dump({key: asdict(one) for key, one in found.items()}, sys.stdout)
