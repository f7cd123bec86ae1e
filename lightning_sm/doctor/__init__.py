"""The doctor, ``lightning-sm doctor``: what this host looks like to a training job, and what would make it fail.

Runs in a container of SageMaker, on a host of the emulator or on a laptop. Each check is a function that yields
results; ``examination.CHECKS`` lists them. The host may be sick: a check that fails or hangs costs its own rows only.
"""
