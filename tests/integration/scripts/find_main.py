"""Print the main address, once it is known."""

from lightning_sm import SageMakerEnvironment

if __name__ == "__main__":
    print("main address:", SageMakerEnvironment(resolve_timeout_s=50).main_address)
