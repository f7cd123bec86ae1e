"""Validation of the training script before any host starts."""

from __future__ import annotations

from pathlib import Path

from lightning_sm.errors import ScriptError
from lightning_sm.launcher.user_code.script import interpreter


def check_script(script: str) -> None:
    """Reject a script that would fail on every host.

    Raises:
        ScriptError: The script cannot be read, parsed or started.
    """
    path = Path(script)
    interpreter(path)
    if path.suffix != ".py":
        return
    try:
        compile(path.read_bytes(), script, "exec", dont_inherit=True)
    except OSError as error:
        raise ScriptError(f"The training script {script!r} cannot be read: {error.strerror}.") from error
    except SyntaxError as error:
        raise ScriptError(f"{script}:{error.lineno}: {error.msg}") from error
    except ValueError as error:  # NUL bytes, in Python 3.10 and 3.11
        raise ScriptError(f"{script}: {error}") from error
