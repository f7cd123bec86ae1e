# make train   sets up .venv and trains the example app on an emulated cluster of two hosts
# make test    sets up .venv and runs every test
# make check   format, lint, types, layers, unit tests: what every commit must pass

PYTHON ?= python3
# Of make test. Each starts up to four processes with torch (4 GB).
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(max(1, min(3, (os.cpu_count() or 1) - 1)))')
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLKIT := $(VENV)/.toolkit
SDK3 := .venv-sdk3
SOURCES := lightning_sm app tests benchmarks

.PHONY: train test lint check format clean

train: $(READY)
	$(BIN)/lightning-sm local --group trainer=2 --group data=2 --base-dir outputs --keep -- \
		app/train.py fit --config app/configs/digits.yaml

# The tests in containers are one group, which takes longest, and so start before the other groups.
test: $(READY) $(TOOLKIT) $(SDK3)/.ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder \
		tests/unit tests/containers tests/integration

lint: $(READY)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile tests/containers/stand_in/Dockerfile tests/containers/routes/Dockerfile

check: lint
	$(BIN)/python -m pytest -q tests/unit

format: $(READY)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) $(SDK3) outputs

# One resolve for everything: a second one could change torch. lightning-bolts comes without its dependencies, because
# it asks for pytorch-lightning<2 (see app/bolts_compat.py).
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is older than 3.10; name another: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "make: no virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[vision,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'lightning-bolts==0.7.0'
	@touch $@

# The stock toolkit, against which some tests run, compiles a C extension. Without a compiler those tests are skipped.
$(TOOLKIT): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[vision,dev,launch,container]' || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[vision,dev,launch]'
	@touch $@

# Versions 2 and 3 of the SageMaker SDK share a distribution name. sagemaker-train is the part of version 3 that trains;
# the rest is what lightning-sm submit imports (the package itself comes by PYTHONPATH, without torch).
$(SDK3)/.ready: Makefile
	@test -x $(SDK3)/bin/pip || $(PYTHON) -m venv $(SDK3)
	$(SDK3)/bin/python -m pip install --quiet --disable-pip-version-check 'sagemaker-train>=1.27,<2' \
		'jsonargparse[signatures]>=4.39,<5' 'psutil>=5.9,<8' 'tabulate>=0.9,<1'
	@touch $@
