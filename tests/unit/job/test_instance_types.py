"""The table of instance types."""

from __future__ import annotations

import pytest

from lightning_sm.job.instance_types import has_gpus, is_accelerated, num_gpus, num_vcpus


@pytest.mark.parametrize(
    ("instance_type", "accelerated", "gpus", "count"),
    [
        ("ml.g5.xlarge", True, True, 1),
        ("ml.g6e.48xlarge", True, True, 8),
        ("ml.p5.4xlarge", True, True, 1),
        ("ml.p6-b200.48xlarge", True, True, 8),
        ("ml.gr6.4xlarge", True, True, None),
        ("ml.p9.48xlarge", True, True, None),
        ("ml.trn1.32xlarge", True, False, None),
        ("ml.c6i.8xlarge", False, False, 0),
        ("local", None, False, None),
        ("local_gpu", None, False, None),
        (None, None, False, None),
    ],
)
def test_instance_types(instance_type, accelerated, gpus, count):
    """The family determines the accelerator; an unlisted type has an unknown number of GPUs."""
    assert is_accelerated(instance_type) is accelerated
    assert has_gpus(instance_type) is gpus
    assert num_gpus(instance_type) == count


@pytest.mark.parametrize(
    ("instance_type", "vcpus"),
    [
        ("ml.c5.18xlarge", 72),
        ("ml.c5.xlarge", 4),
        ("ml.m5.large", 2),
        ("ml.t3.medium", 2),
        ("ml.p4d.24xlarge", 96),
        ("ml.m5.metal", None),
        ("local", None),
        ("data", None),
        (None, None),
    ],
)
def test_vcpus_follow_from_the_size(instance_type, vcpus):
    """A size is a multiple of four vCPUs; the smallest sizes have two."""
    assert num_vcpus(instance_type) == vcpus
