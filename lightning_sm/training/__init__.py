"""The part that runs inside the training script: the CLI, the cluster environment, callbacks, checkpoints."""
