"""Code that runs inside the training script: the CLI, the cluster environment, callbacks and checkpoints."""
