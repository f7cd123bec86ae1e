"""The doctor, ``lightning-sm doctor``, which finds what would make a training job fail on this host.

It runs in a container of SageMaker, on a host of the emulator or on a laptop. Each check is a function that yields
results; ``run.CHECKS`` lists them. A check that fails or hangs loses only its own rows.
"""
