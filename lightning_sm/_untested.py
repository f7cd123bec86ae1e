"""Notes on features not tested under real conditions, for ``--help`` and the log (full list: docs/tested.md)."""

SERVICE = "Never run against the SageMaker service itself, only against botocore's model of it (docs/tested.md)."
GPUS = "lightning_sm has run on one GPU, and never with NCCL between GPUs or with EFA (docs/tested.md)."
SMDDP = "strategy=smddp has never run with SMDDP itself, only with a stand-in for it (docs/tested.md)."
