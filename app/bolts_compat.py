"""Import lightning-bolts with Lightning 2, which its last release does not support.

lightning-bolts 0.7.0 (2023) requires pytorch-lightning<2, hence ``pip install --no-deps``. Its data modules need two
functions that Lightning 2 moved to other packages. This module restores their former names: the module
``pytorch_lightning.utilities.apply_func`` and the attribute ``pytorch_lightning.utilities.move_data_to_device``. Models
that use hooks removed in Lightning 2, such as the GANs and ``LogisticRegression``, still fail in ``fit``.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from types import ModuleType

import pytorch_lightning.utilities
from lightning_fabric.utilities.apply_func import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection

_APPLY_FUNC = "pytorch_lightning.utilities.apply_func"

# Importing lightning-bolts always causes these warnings: its features are under review, and it checks for an attribute
# that a future NumPy may define.
_EXPECTED_WARNINGS = re.compile(r"The feature \w+ is currently marked under review|In the future `np\.\w+` will be")


def import_bolts(module: str) -> ModuleType:
    """Import a module of lightning-bolts.

    Any import loads nearly all of lightning-bolts (0.2 s after torch and Lightning) and changes urllib's user agent, so
    call this only where the module is used.

    Args:
        module: Name of the module, such as ``pl_bolts.datamodules``.

    Raises:
        ModuleNotFoundError: lightning-bolts is not installed.
    """
    _restore_former_names()
    # lightning-bolts puts its warning filter before all others, so only recording suppresses its warnings.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != "pl_bolts":
                raise
            raise ModuleNotFoundError(
                f"{module} needs lightning-bolts, which is not installed. Install it with pip install --no-deps "
                "lightning-bolts==0.7.0 (without --no-deps, pip downgrades pytorch-lightning to version 1).",
                name=error.name,
            ) from error
    for warning in caught:
        if not _EXPECTED_WARNINGS.search(str(warning.message)):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return imported


def _restore_former_names() -> None:
    # Keep an existing module, which is Lightning's or a user's.
    if _APPLY_FUNC not in sys.modules:
        apply_func = ModuleType(_APPLY_FUNC, "Functions that lightning-bolts imports from here (see app.bolts_compat).")
        vars(apply_func).update(apply_to_collection=apply_to_collection, move_data_to_device=move_data_to_device)
        sys.modules[_APPLY_FUNC] = apply_func
    vars(pytorch_lightning.utilities).setdefault("move_data_to_device", move_data_to_device)
