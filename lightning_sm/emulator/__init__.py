"""The emulator, ``lightning-sm local``: a SageMaker cluster on this machine, whose hosts are processes or containers.

SageMaker's local mode has no instance groups. Here, every host has a separate ``/opt/ml``, an address, and the files
that the service would write, and runs the container's entry point.
"""
