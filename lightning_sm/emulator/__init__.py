"""The emulator, ``lightning-sm local``: a SageMaker cluster on this machine, with processes or containers as hosts.

SageMaker's local mode has no instance groups. Here, each host has its own ``/opt/ml`` and address, finds
the files that the service would write, and runs the container's entry point.
"""
