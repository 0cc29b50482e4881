PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/tiny.toml
DEVICE ?= cuda
CHAOS ?= --kills 144 --hangs 16
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
WORKERS ?= 3
ENVIRONMENTS_VENV ?= .venv-environments
VERIFIERS_VENV ?= .venv-verifiers
S3_VENV ?= .venv-s3-server
TRITON ?= .triton

# What Python and pytest compile of our files is kept: each of the tests' processes would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-long chaos test-wheel test-image test-browser test-vllm test-kernels test-environments test-verifiers test-cluster test-slurm test-storage check check-torch gpu install clean

train: install  ## the true asynchronous job on this machine, in minutes
	$(BIN)/llamarl train $(RECIPE)

test: install  ## the whole CPU suite: a file at a time, whole runs before the unit tests, which then fill what is left
	$(BIN)/python -m pytest --ignore tests/browser -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest tests/browser  # apart: a browser's driver leaves an event loop in its process

test-long: install  ## more cases of what the suite shows by one: every page, example, moment of a kill, the wheel
	$(BIN)/python -m pytest -m long -n $(WORKERS) --dist loadfile

chaos: install  ## real jobs of eight kinds under random deaths and hangs: 20 runs, minutes; the whole thousand: CHAOS="--kills 1000"
	$(BIN)/python scripts/kill_runs.py --a-run 8 $(CHAOS)

test-wheel:  ## the built wheel in an environment of its own, in an empty folder
	$(PYTHON) scripts/try_wheel.py

test-image:  ## the steps of examples/cluster/Dockerfile in a clean Debian: as root (Debian: apt-get install debootstrap)
	$(PYTHON) scripts/try_image.py $(IMAGE)

test-browser: install  ## every view of llamarl report in Chromium (Debian: apt-get install chromium)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest tests/browser -m "browser or not browser"

test-cluster: install  ## jobs on a Ray cluster whose nodes share nothing (namespaces on a bridge): as root, Linux
	$(BIN)/python -m pytest tests/cluster -m "cluster or not cluster" --durations=0 -s

test-slurm: install  ## the batch script of examples/cluster on a Slurm cluster on such hosts: as root (Debian: apt-get install slurm-wlm munge)
	$(BIN)/python -m pytest tests/real_slurm -m "slurm or not slurm" --durations=0 -s

test-storage: install $(S3_VENV)/.installed  ## the mirror of a run on an S3 server on this machine, which has an environment of its own (0.3 GB)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[storage]'
	MOTO_SERVER="$(abspath $(S3_VENV))/bin/moto_server" $(BIN)/python -m pytest tests/storage -m "storage or not storage" -s

test-vllm: $(VLLM_VENV)/.installed  ## the vLLM engine on vLLM's CPU build, in an environment of its own (4 GB)
	$(VLLM_VENV)/bin/python -m pytest tests/with_vllm

test-kernels: install $(TRITON)/.installed  ## the kernels for GPUs against float64 and the CPU's checksums, by Triton's interpreter (0.7 GB)
	TRITON_INTERPRET=1 PYTHONPATH="$(abspath $(TRITON))" $(BIN)/python -m pytest tests/gpu/test_triton_kernels.py

test-environments: $(ENVIRONMENTS_VENV)/.installed  ## the adapters on openenv-core, textarena and openai, in an environment of their own
	$(ENVIRONMENTS_VENV)/bin/python -m pytest tests/with_environments

test-verifiers: $(VERIFIERS_VENV)/.installed  ## an agent of verifiers as an agent program, in an environment of its own
	PATH="$(abspath $(VERIFIERS_VENV))/bin:$$PATH" $(VERIFIERS_VENV)/bin/python -m pytest tests/with_environments/test_verifiers.py

check: install  ## formatter, linter, type checker
	$(BIN)/ruff format --check src tests benchmarks examples scripts
	$(BIN)/ruff check src tests benchmarks examples scripts
	$(BIN)/mypy

gpu: install  ## everything that one GPU must show, in ten minutes; results in runs/gpu (make gpu DEVICE=cpu tries the script)
	$(BIN)/python scripts/gpu_day.py --device $(DEVICE)

check-torch: install  ## the type checker against the oldest torch that pyproject.toml allows and the newest (two wheels, 0.2 GB)
	$(BIN)/python scripts/check_torch.py

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt -e .
	touch $@

$(S3_VENV)/.installed:
	$(PYTHON) -m venv $(S3_VENV)
	$(S3_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'moto[server]==5.2.5'
	touch $@

$(TRITON)/.installed:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(TRITON) triton==3.6.0 numpy==2.3.5
	touch $@

$(ENVIRONMENTS_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENVIRONMENTS_VENV)
	$(ENVIRONMENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check openenv-core==0.3.0 textarena==0.7.4 openai xxhash \
		pytest pytest-timeout hypothesis
	$(ENVIRONMENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(VERIFIERS_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 uv xxhash numpy \
		pytest pytest-timeout hypothesis
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(ENVIRONMENTS_VENV) $(VERIFIERS_VENV) $(S3_VENV) $(TRITON) runs .pytest_cache .mypy_cache .ruff_cache
