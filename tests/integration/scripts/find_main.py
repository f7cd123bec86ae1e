"""Print the main address, once it is known. Argument: seconds to wait for it."""

import sys

from lightning_sm import SageMakerEnvironment, prepare_process
from lightning_sm.training import environment as module

if __name__ == "__main__":
    module.RESOLVE_TIMEOUT_S = float(sys.argv[1])
    environment = SageMakerEnvironment()
    prepare_process(environment)
    print("main address:", environment.main_address)
