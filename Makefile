PYTHON ?= python3
# Two more workers than cores, because tests wait for processes to start. Each starts up to four with torch (4 GB).
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 2 + (os.cpu_count() or 1)))')
VENV := .venv
BIN := $(VENV)/bin
# Stamp files of what is installed: the app's packages, then the extra packages of each further target.
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
TOOLKIT := $(VENV)/.toolkit
SPHINX := $(VENV)/.sphinx
MUTANTS := $(VENV)/.mutants
PROOF := $(VENV)/.proof
TRANSFORMERS := $(VENV)/.transformers
SOURCES := lightning_sm app tests benchmarks docker docs
# uv, if installed, downloads and unpacks in parallel. Use pip anyway with `make UV=`.
UV := $(shell command -v uv)
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
# Let Python compile each module on first import. A training run imports a sixth of the files, and compiling all of them
# would take longer than unpacking them.
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

proof: test $(SPHINX) $(PROOF) $(TRANSFORMERS) ## make test, then full matrices, all examples, both SDKs, both Lightning packages
	$(PYTEST) -m proof tests/containers tests/integration tests/unit

gpu: $(DEV) ## test what needs a GPU: page-locked slots, CUDA graphs, restarts, strategies, the example app on CUDA
	$(LOCAL) '.[gpu]'
	$(BIN)/python -m pytest -rs tests/gpu

mutants: $(MUTANTS) ## change the pure rules one by one, and list the changes that no test notices
	$(BIN)/python -m tests.mutants $(PARTS)

check: $(DEV) ## run lint and unit tests, which every commit must pass
	@$(MAKE) --no-print-directory --output-sync=target -j2 lint unit

lint: $(DEV) ## check format, lint, types, import contracts, Dockerfiles
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint.class_names
	$(BIN)/python -m tests.lint.ports
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.dlc tests/containers/stand_in/Dockerfile \
		tests/containers/stand_in/Dockerfile.dlc tests/containers/routes/Dockerfile
	$(BIN)/mypy

unit: $(DEV) ## run the unit tests
	$(BIN)/python -m pytest -n $(WORKERS) -q -m "not proof" tests/unit

docs: $(SPHINX) ## build the pages and the reference into outputs/docs/index.html
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going --quiet \
		--conf-dir docs --doctree-dir outputs/docs.cache . outputs/docs

diagrams: $(SPHINX) ## draw changed Mermaid diagrams for the site (needs Node, Chromium and a network)
	$(BIN)/python docs/diagrams.py

pictures: $(TOOLKIT) ## make the pictures of README and docs from emulated jobs (needs Chromium)
	$(BIN)/python docs/pictures.py

format: $(DEV) ## format the tree and apply the linter's fixes
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

IMAGE ?= lightning-sm
lock: ## freeze the packages of a working image (IMAGE=lightning-sm) in docker/*.lock, which later builds install
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

# Each step resolves all of its packages at once, because a second resolve could change torch. lightning-bolts is installed
# without its dependencies, because it requires pytorch-lightning<2 (see app/bolts_compat.py).
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

# pip supports dependency groups since 25.1.
$(DEV): $(READY)
	$(if $(UV),,$(BIN)/python $(PIP) 'pip>=25.1')
	$(LOCAL) $(TESTED)
	@touch $@

# Some tests run against the stock toolkit, which compiles a C extension.
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

# torchmetrics imports transformers if it is installed, and each process with torch then starts a second later. So it goes
# into a separate environment, which shares all other packages with this one.
$(TRANSFORMERS): $(PROOF)
	$(BIN)/python -m venv --clear --without-pip $(VENV)/transformers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(VENV)/transformers/tests.pth
	mv $(VENV)/transformers/tests.pth $(VENV)/transformers/lib/python3.*/site-packages
	$(BIN)/python -m pip --python $(VENV)/transformers/bin/python install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --group transformers
	@touch $@
