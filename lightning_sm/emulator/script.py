"""Validation of the training script before any host starts."""

from __future__ import annotations

from pathlib import Path

from lightning_sm.errors import ScriptError


def check_script(script: str) -> None:
    """Reject a script that would fail on every host.

    Raises:
        ScriptError: The script is neither a Python file nor a shell script, or cannot be read or parsed.
    """
    path = Path(script)
    if path.suffix not in {".py", ".sh"}:
        raise ScriptError(f"The training script {script!r} is neither a Python file (*.py) nor a shell script (*.sh).")
    try:
        content = path.read_bytes()
        if path.suffix == ".py":
            compile(content, script, "exec", dont_inherit=True)
    except OSError as error:
        raise ScriptError(f"The training script {script!r} cannot be read: {error.strerror}.") from error
    except SyntaxError as error:
        raise ScriptError(f"{script}:{error.lineno}: {error.msg}") from error
    except ValueError as error:  # NUL bytes, in Python 3.10 and 3.11
        raise ScriptError(f"{script}: {error}") from error
