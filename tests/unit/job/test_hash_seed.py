"""All processes of a job hash strings alike."""

from lightning_sm.job.hash_seed import hash_seed


def test_the_seed_is_fixed_unless_the_user_sets_it():
    """Any value of the user's is kept, also the one that asks for random hashes; an empty one is none to Python."""
    assert [hash_seed(env) for env in ({}, {"PYTHONHASHSEED": ""})] == [{"PYTHONHASHSEED": "0"}] * 2
    assert hash_seed({"PYTHONHASHSEED": "7", "A": "1"}) == {"PYTHONHASHSEED": "7"}
    assert hash_seed({"PYTHONHASHSEED": "random"}) == {"PYTHONHASHSEED": "random"}
