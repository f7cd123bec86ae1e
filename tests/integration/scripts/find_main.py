"""Print the main address, once it is known. Argument: seconds to wait for it."""

import sys

from lightning_sm import SageMakerEnvironment, prepare_process

if __name__ == "__main__":
    environment = SageMakerEnvironment(resolve_timeout_s=float(sys.argv[1]))
    prepare_process(environment)
    print("main address:", environment.main_address)
