"""Print the main address, once it is known. Argument: seconds to wait for it."""

import sys

from lightning_sm import SageMakerEnvironment

if __name__ == "__main__":
    print("main address:", SageMakerEnvironment(resolve_timeout_s=float(sys.argv[1])).main_address)
