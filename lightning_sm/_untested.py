"""What has never run on the real thing, for ``--help`` and the log; docs/tested.md has the whole table."""

SERVICE = "Never run against the SageMaker service itself, only against botocore's model of it (docs/tested.md)."
GPUS = "lightning_sm has never run on GPUs, with NCCL or with EFA (docs/tested.md)."
SMDDP = "strategy=smddp has never run with SMDDP itself, only with a stand-in for it (docs/tested.md)."
NETWORK_PROCESSES = "Several network processes have never run on a host with the cores they are for (docs/tested.md)."
