"""The doctor, ``lightning-sm doctor``: what this host looks like to a training job, and what would make a job fail.

Runs in a container of SageMaker, on a host of the emulator or on a laptop. Each check is a function that yields
results; ``run.CHECKS`` lists them. A check that fails or hangs loses only its own rows.
"""
