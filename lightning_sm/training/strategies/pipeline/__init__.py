"""Pipeline parallelism for an ordinary LightningModule, alone or combined with data parallelism."""
