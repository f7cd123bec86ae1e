"""The emulator, ``lightning-sm local``: a SageMaker cluster on this machine, whose hosts are processes or containers.

SageMaker's local mode has no instance groups. Here, every host has its own ``/opt/ml``, its own address and
the files that the service would write, and it runs the container's entry point.
"""
