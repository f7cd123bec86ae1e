"""Wait for the main address and print it. Argument: the timeout in seconds."""

import sys

from lightning_sm import SageMakerEnvironment, prepare_process
from lightning_sm.training import environment as module

if __name__ == "__main__":
    module.RESOLVE_TIMEOUT_S = float(sys.argv[1])
    environment = SageMakerEnvironment()
    prepare_process(environment)
    print("main address:", environment.main_address)
