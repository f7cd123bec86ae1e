"""A common hash seed for all processes of a job."""

from lightning_sm.job.hash_seed import hash_seed


def test_the_seed_is_fixed_unless_the_user_sets_it():
    """The user's value is kept, even "random"; an empty value counts as unset, as in Python."""
    assert [hash_seed(env) for env in ({}, {"PYTHONHASHSEED": ""})] == [{"PYTHONHASHSEED": "0"}] * 2
    assert hash_seed({"PYTHONHASHSEED": "7", "A": "1"}) == {"PYTHONHASHSEED": "7"}
    assert hash_seed({"PYTHONHASHSEED": "random"}) == {"PYTHONHASHSEED": "random"}
