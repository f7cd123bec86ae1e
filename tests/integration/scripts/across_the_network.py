"""One end of the data service, controlled by lines on stdin.

Arguments: ``serve ADDRESS TRUSTED``, ``train ADDRESS ADDRESS`` or ``refused ADDRESS``.
"""

import sys
import time

from torch.utils.data import DataLoader

from lightning_sm import DataHost, RemoteDataModule
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.errors import DataServiceError
from tests.integration.data.cluster import seeded, undisturbed
from tests.integration.data.datasets import Augmented, Data, stream_hash

NUM_SAMPLES, BATCH_SIZE, BATCH_TIMEOUT_S = 800, 4, 6.0
CUT, HEAL = 20, 100


def serve(address, trusted):
    with DataHost(address, workers=1, settings=DataServiceSettings(trust=[trusted])):
        say("listening")
        sys.stdin.read()


def make():
    return DataLoader(Augmented(NUM_SAMPLES), batch_size=BATCH_SIZE, shuffle=True)


def train(addresses):
    settings = DataServiceSettings(batch_timeout_s=BATCH_TIMEOUT_S, window_batches=8)
    wanted = undisturbed(addresses, make)[0]
    module = RemoteDataModule(Data(make), addresses, settings=settings)
    loader = seeded(module.train_dataloader())
    batches, kept, gaps = iter(loader), [], []
    wait_for(module, "up")
    began = time.monotonic()
    for step, batch in enumerate(batches):
        gaps.append(time.monotonic() - began)
        kept.append({name: value.clone() if hasattr(value, "clone") else value for name, value in batch.items()})
        if step == CUT:
            ask("cut one")
        elif step == HEAL:
            wait_for(module, "suspect", "down")
            ask("heal")
            mended = time.monotonic()
            wait_for(module, "up")
            adoption = time.monotonic() - mended
            # Force the use of the healed host: otherwise the other one could finish the epoch before the healed host
            # has started its worker.
            ask("cut the other")
        began = time.monotonic()
    say(f"same {stream_hash(kept) == wanted} steps {len(kept)}")
    longest, replacement = max(gaps[: HEAL + 1]), max(gaps[HEAL + 1 :])
    say(f"longest {longest:.2f} adopted in {adoption:.2f} replaced in {replacement:.2f}")
    batches = iter(loader)
    next(batches)
    ask("cut the last")
    say_error(batches)
    module.close()


def refused(address):
    say_error(RemoteDataModule(Data(make), [address]).train_dataloader())


def say_error(batches):
    """Read batches until an error is raised, and print the error and the seconds until then."""
    began = time.monotonic()
    try:
        list(batches)
    except DataServiceError as error:
        say(f"{type(error).__name__} after {time.monotonic() - began:.1f}: {' '.join(str(error).split())}")


def last_host(module):
    return module._service_connection.feeder.snapshot().hosts[-1]


def wait_for(module, *states):
    """Wait until the last host is in one of the states. The loop needs no sleep: each snapshot waits for the feeder."""
    while last_host(module).state not in states:
        pass


def say(text):
    print(text, flush=True)


def ask(text):
    say(text)
    sys.stdin.readline()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    elif sys.argv[1] == "refused":
        refused(sys.argv[2])
    else:
        train(sys.argv[2:])
