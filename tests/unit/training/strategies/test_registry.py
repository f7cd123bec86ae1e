"""Strategy names that a plain Trainer can use in a script that imports lightning_sm."""

import subprocess
import sys

import pytest

_PLAIN_TRAINER = """
import sys
{imports}
if "lightning_sm._lightning" in sys.modules:
    sys.exit("lightning_sm loaded its strategies, and chose a Lightning, before anything needed it")
trainer = Trainer(strategy="pipeline", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
print(type(trainer.strategy).__name__)
"""


@pytest.mark.matrix(rows=["after", "question"])
@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_sm\nfrom pytorch_lightning import Trainer",
        "from pytorch_lightning import Trainer\nimport lightning_sm",
        # find_spec, which other packages call, does not import the module.
        "import importlib.util\nimport lightning_sm\nimportlib.util.find_spec('pytorch_lightning.strategies')\n"
        "from pytorch_lightning import Trainer",
    ],
    ids=["before Lightning", "after Lightning", "before a question"],
)
def test_the_import_of_lightning_sm_registers_strategies(imports):
    """Lightning's Trainer finds the strategies by name, in either order of the imports."""
    command = [sys.executable, "-c", _PLAIN_TRAINER.format(imports=imports)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout.strip() == "PipelineParallelStrategy", ended.stderr
