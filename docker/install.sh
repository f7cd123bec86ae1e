#!/bin/bash
# Install the packages of the image: from docker/*.lock if it exists, else from environment.yml.
#
# CUDA     newest CUDA version that the driver supports; empty for CPUs.
# TOOLKIT  0 replaces sagemaker-training by boto3, the only one of its dependencies that is needed.
# EFA      1 adds NCCL's plugin for EFA.
# A lock overrides these: the packages are those of the frozen image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# The last sagemaker-training has no wheel; without these settings, old versions of pip would run its setup.py.
export PIP_NO_CACHE_DIR=1 PIP_PREFER_BINARY=1 PIP_USE_PEP517=1

if [ -e conda.lock ]; then
    micromamba install --yes --name base --file conda.lock
    pip install --no-deps --require-hashes --requirement pip.lock
else
    if [ "${TOOLKIT}" = 0 ]; then
        sed -i 's/- sagemaker-training.*/- boto3>=1,<2/' environment.yml
    fi
    if [ "${EFA}" = 1 ]; then
        sed -i 's/# \(- aws-ofi-nccl\)/\1/' environment.yml
    fi
    CONDA_OVERRIDE_CUDA="${CUDA}" micromamba install --yes --name base --file environment.yml
fi
micromamba clean --all --yes
