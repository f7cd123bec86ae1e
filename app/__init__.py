"""An ordinary Lightning application: ResNet-18 on small images, run on SageMaker clusters through ``lightning_sm``."""
