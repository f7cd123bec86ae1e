"""The doctor, ``lightning-sm doctor``, which finds what a failed or slow job would not say itself.

It runs in a container of SageMaker, on a host of the emulator or on a laptop. Each check is a function that yields
results; ``command.CHECKS`` lists them.
"""
