"""Train on data hosts until interrupted in some way. Arguments: the way, a folder, and the data hosts' addresses."""

import os
import signal
import sys
from pathlib import Path

from pytorch_lightning.callbacks import Callback

from lightning_sm import RemoteDataModule
from tests.integration.data.numbers import Data, Recorder, quiet_trainer


class Ends(Callback):
    """Stops the training at its third batch."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step < 2:
            return
        if sys.argv[1] == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif sys.argv[1] == "exit":
            sys.exit(3)
        elif sys.argv[1] == "hard exit":
            os._exit(4)


if __name__ == "__main__":
    folder, addresses = Path(sys.argv[2]), sys.argv[3:]
    module = RemoteDataModule(Data(folder), addresses)
    trainer = quiet_trainer(folder, max_epochs=1000, callbacks=[Ends()])
    trainer.fit(Recorder(), datamodule=module)
