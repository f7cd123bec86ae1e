"""The emulator, ``lightning-sm local``: a SageMaker cluster on this machine, with one process group per host.

SageMaker's own local mode has no instance groups. Here, every host has its own ``/opt/ml``, its own loopback address
and the files that the service would write, and runs the container's entry point.
"""
