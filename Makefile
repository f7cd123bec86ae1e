PYTHON ?= python3
# One more than cores, because tests wait for processes that start; each starts up to four with torch (4 GB).
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')
VENV := .venv
BIN := $(VENV)/bin
# What is installed so far: what the app needs, then what each further target needs besides.
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
TOOLKIT := $(VENV)/.toolkit
SPHINX := $(VENV)/.sphinx
MUTANTS := $(VENV)/.mutants
PROOF := $(VENV)/.proof
TRANSFORMERS := $(VENV)/.transformers
SOURCES := lightning_sm app tests benchmarks docker docs
# uv, where it is installed, downloads and unpacks in parallel; make UV= takes pip all the same.
UV := $(shell command -v uv)
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
# Python compiles a module when it is first imported. A training imports a sixth of the files; to compile all of them would
# take longer than to unpack them.
install = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,$(1)/bin/python $(PIP))
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m tests.second_chance -n $(WORKERS)

.PHONY: help train test proof gpu mutants check lint unit docs diagrams pictures format lock sbom clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(READY) ## set up .venv and train the example app on an emulated cluster of two trainer and two data hosts
	$(BIN)/lightning-sm local --group trainer=2 --group data=2 --base-dir outputs -- \
		app/train.py fit --config app/configs/digits.yaml

test: $(TOOLKIT) ## set up .venv and test every property of the product once, with real processes
	$(PYTEST) -m "not proof" tests/containers tests/integration tests/unit

proof: test $(SPHINX) $(PROOF) $(TRANSFORMERS) ## make test, then full matrices, all examples, both SDKs and both Lightnings
	$(PYTEST) -m proof tests/containers tests/integration tests/unit

gpu: $(DEV) ## what only a GPU shows: page-locked slots, CUDA graphs, restarts, strategies, the example app on CUDA
	$(LOCAL) '.[gpu]'
	$(BIN)/python -m pytest -rs tests/gpu

mutants: $(MUTANTS) ## change the pure rules one by one, and list the changes that none of their tests notices
	$(BIN)/python -m tests.mutants $(PARTS)

check: $(DEV) ## what every commit must pass: lint and unit tests
	@$(MAKE) --no-print-directory --output-sync=target -j2 lint unit

lint: $(DEV) ## format, lint, types, import contracts, Dockerfiles
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint.class_names
	$(BIN)/python -m tests.lint.ports
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.dlc tests/containers/stand_in/Dockerfile \
		tests/containers/stand_in/Dockerfile.dlc tests/containers/routes/Dockerfile
	$(BIN)/mypy

unit: $(DEV) ## unit tests
	$(BIN)/python -m pytest -n $(WORKERS) -q -m "not proof" tests/unit

docs: $(SPHINX) ## build the pages and the reference into outputs/docs/index.html
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going --quiet \
		--conf-dir docs --doctree-dir outputs/docs.cache . outputs/docs

diagrams: $(SPHINX) ## draw changed Mermaid diagrams for the site (needs Node, Chromium and a network)
	$(BIN)/python docs/diagrams.py

pictures: $(TOOLKIT) ## make the pictures of README and docs from jobs of the emulator (needs Chromium)
	$(BIN)/python docs/pictures.py

format: $(DEV) ## format the tree and mend what the linter can mend
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

IMAGE ?= lightning-sm
lock: ## freeze the packages of an image that works (IMAGE=lightning-sm) in docker/*.lock, which later builds install
	docker run --rm --entrypoint micromamba $(IMAGE) env export --explicit --name base > docker/conda.lock.new
	docker run --rm --interactive --entrypoint python $(IMAGE) - < docker/pip_lock.py > docker/pip.lock.new
	mv docker/conda.lock.new docker/conda.lock
	mv docker/pip.lock.new docker/pip.lock

SBOM ?= outputs/sbom
AUDIT ?=
sbom: $(PROOF) ## list all packages of an image (IMAGE=lightning-sm), and find known vulnerabilities
	docker run --rm --interactive --entrypoint python $(IMAGE) - < docker/packages.py \
		| $(BIN)/python docker/sbom.py $(IMAGE) $(SBOM).cdx.json $(SBOM).requirements.txt
	$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement $(SBOM).requirements.txt $(AUDIT)

clean: ## remove virtual environments and outputs
	rm -rf $(VENV) outputs

# One resolve in each step for everything that is installed then: another one could change torch. lightning-bolts comes
# without its dependencies, because it asks for pytorch-lightning<2 (see app/bolts_compat.py).
LOCAL = $(call install,$(VENV)) --constraint constraints.txt --editable
GROUPS := --group lint --group test
EXTRAS := vision,report,completion,submit
TESTED := '.[$(EXTRAS)]' $(GROUPS)
WITH_TOOLKIT := '.[$(EXTRAS),container]' $(GROUPS)

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is older than 3.10; name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "make: no virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(READY): pyproject.toml constraints.txt Makefile | $(BIN)/pip
	$(LOCAL) '.[vision,report]'
	$(call install,$(VENV)) --no-deps 'lightning-bolts==0.7.0'
	@touch $@

# pip reads dependency groups from 25.1 on.
$(DEV): $(READY)
	$(if $(UV),,$(BIN)/python $(PIP) 'pip>=25.1')
	$(LOCAL) $(TESTED)
	@touch $@

# The stock toolkit, against which some tests run, compiles a C extension.
$(TOOLKIT): $(DEV)
	$(if $(shell command -v gcc cc),$(LOCAL) $(WITH_TOOLKIT),\
		@echo "make: no C compiler: tests against sagemaker-training will be skipped; on Debian and Ubuntu: apt install gcc")
	@touch $@

$(SPHINX): $(TOOLKIT)
	$(LOCAL) $(TESTED) --group docs
	@touch $@

$(MUTANTS): $(DEV)
	$(LOCAL) $(TESTED) --group mutants
	@touch $@

$(PROOF): $(TOOLKIT)
	$(LOCAL) $(TESTED) --group proof
	@touch $@

# Where transformers is installed, torchmetrics imports it, and each process with torch starts a second later. So it lies apart,
# in an environment that has all else from this one.
$(TRANSFORMERS): $(PROOF)
	$(BIN)/python -m venv --clear --without-pip $(VENV)/transformers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(VENV)/transformers/tests.pth
	mv $(VENV)/transformers/tests.pth $(VENV)/transformers/lib/python3.*/site-packages
	$(BIN)/python -m pip --python $(VENV)/transformers/bin/python install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --group transformers
	@touch $@
