"""The command ``lightning-sm doctor``, which finds problems that a failed or slow job would not report itself.

It runs in a SageMaker container, on a host of the emulator or on a laptop. Each check is a function that yields
results; ``command.CHECKS`` lists the checks.
"""
