PYTHON ?= python3
# One more than cores, because tests wait for processes that start; each starts up to four with torch (4 GB).
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLKIT := $(VENV)/.toolkit
SDK3 := .venv-sdk3
SPHINX := $(VENV)/.sphinx
SOURCES := lightning_sm app tests benchmarks docker docs
PIP := -m pip install --quiet --disable-pip-version-check
# The tests in containers form one group, which takes longest and so starts before the other groups.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: help train test proof gpu check lint unit docs diagrams format lock sbom clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(READY) ## set up .venv and train the example app on an emulated cluster of two trainer and two data hosts
	$(BIN)/lightning-sm local --group trainer=2 --group data=2 --base-dir outputs -- \
		app/train.py fit --config app/configs/digits.yaml

test: $(READY) $(TOOLKIT) ## set up .venv and test every property of the product once, with real processes
	$(PYTEST) -m "not proof" tests/containers tests/integration tests/unit

proof: test $(SDK3)/.ready $(SPHINX) ## make test, then full matrices, all examples, both SDKs and both Lightnings
	$(PYTEST) -m proof tests/containers tests/integration tests/unit

gpu: $(READY) ## what only a GPU shows: page-locked slots, CUDA graphs, the example app on CUDA
	$(BIN)/python -m pytest -rs tests/gpu

check: $(READY) ## what every commit must pass: lint and unit tests
	@$(MAKE) --no-print-directory --output-sync=target -j2 lint unit

lint: $(READY) ## format, lint, types, import contracts, Dockerfiles
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile tests/containers/stand_in/Dockerfile tests/containers/routes/Dockerfile
	$(BIN)/mypy

unit: $(READY) ## unit tests
	$(PYTEST) -q -m "not proof" tests/unit

docs: $(SPHINX) ## build the pages and the reference into outputs/docs/index.html
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going --quiet \
		--conf-dir docs --doctree-dir outputs/docs.cache . outputs/docs

diagrams: $(SPHINX) ## draw changed Mermaid diagrams for the site (needs Node, Chromium and a network)
	$(BIN)/python docs/diagrams.py

format: $(READY) ## format the tree and mend what the linter can mend
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
sbom: $(READY) ## list all packages of an image (IMAGE=lightning-sm), and find known vulnerabilities
	docker run --rm --interactive --entrypoint python $(IMAGE) - < docker/packages.py \
		| $(BIN)/python docker/sbom.py $(IMAGE) $(SBOM).cdx.json $(SBOM).requirements.txt
	$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement $(SBOM).requirements.txt $(AUDIT)

clean: ## remove virtual environments and outputs
	rm -rf $(VENV) $(SDK3) outputs

# One resolve for everything: a second one could change torch. lightning-bolts comes without its dependencies, because
# it asks for pytorch-lightning<2 (see app/bolts_compat.py). With fewer garbage collections, Lightning is imported in four
# fifths of the time, and most of what the tests wait for is that.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is older than 3.10; name another: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "make: no virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python $(PIP) -c constraints.txt -e '.[vision,dev]'
	$(BIN)/python $(PIP) --no-deps 'lightning-bolts==0.7.0'
	@echo 'import gc; gc.set_threshold(50_000, 20, 1000)' > \
		$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/fewer_collections.pth
	@touch $@

# The stock toolkit, against which some tests run, compiles a C extension. Without a compiler those tests are skipped.
$(TOOLKIT): $(READY)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[vision,dev,launch,container]' || \
	$(BIN)/python $(PIP) -c constraints.txt -e '.[vision,dev,launch]'
	@touch $@

$(SPHINX): $(TOOLKIT)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[vision,dev,launch,docs]'
	@touch $@

# Versions 2 and 3 of the SageMaker SDK share a distribution name. sagemaker-train is the part of version 3 that trains;
# the rest is what lightning-sm submit imports (the package itself comes by PYTHONPATH, without torch).
$(SDK3)/.ready: Makefile
	@test -x $(SDK3)/bin/pip || $(PYTHON) -m venv $(SDK3)
	$(SDK3)/bin/python $(PIP) 'sagemaker-train>=1.27,<2' \
		'jsonargparse[signatures]>=4.39,<4.54' 'psutil>=5.9,<8' 'tabulate>=0.9,<1'
	@touch $@
