"""The app's transformer; ranks can share a GPU with ``--trainer.strategy.process_group_backend=staged``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tests.gpu.staged  # noqa: F401  # registers the backend
from app.train_text import main

if __name__ == "__main__":
    main()
