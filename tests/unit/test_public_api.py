"""The public names, and the modules that importing them loads."""

import subprocess
import sys

import pytest

import lightning_sm


def test_every_public_name_can_be_imported():
    """Each name in ``__all__`` exists and belongs to this package."""
    for name in set(lightning_sm.__all__) - {"__version__"}:
        assert getattr(lightning_sm, name).__module__.startswith("lightning_sm.")


def test_the_namespace_is_the_public_api():
    """``dir`` lists exactly the names in ``__all__``, and all of them can be loaded."""
    assert dir(lightning_sm) == sorted(lightning_sm.__all__)
    assert {*lightning_sm._MODULE_OF, "__version__"} == set(lightning_sm.__all__)


def test_an_unknown_name_is_an_attribute_error():
    """A misspelled name raises AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="'lightning_sm' has no attribute 'SagemakerCLI'"):
        _ = lightning_sm.SagemakerCLI


def test_facts_and_rules_come_without_torch():
    """Importing the package, the facts and the rules loads neither torch nor Lightning."""
    code = (
        "import sys; from lightning_sm import Channel, InstanceGroup, Role, SageMakerJob, Topology; "
        "sys.exit(', '.join({'torch', 'pytorch_lightning', 'lightning', 'lightning_fabric'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip() == ""
