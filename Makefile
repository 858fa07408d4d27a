# `make train` trains the tiny agent; `make test` runs the tests. Every target sets up .venv first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
INSTALLED := .venv/installed-$(DEVICE)

# The CPU build of torch that the CPU build of vLLM is made for; the index is PyTorch's own.
TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# OpenMP threads that spin while they wait slow each other down tenfold on shared cores.
OMP_WAIT_POLICY ?= PASSIVE
GOMP_SPINCOUNT ?= 0
export OMP_WAIT_POLICY GOMP_SPINCOUNT

TRAIN := $(BIN)/python examples/train_tool_agent.py
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup
ARGS ?=

# The server of `make serve`: the tiny agent, unless MODEL names another.
PORT ?= 8000
TINY_AGENT := from tiny_agent import tiny_agent_path; print(tiny_agent_path())
MODEL ?= $(shell PYTHONPATH=examples $(BIN)/python -c "$(TINY_AGENT)" 2>/dev/null | tail -n 1)

.PHONY: train test e2e bench gpu-check serve soak stops lint docs wheel wheel-check audit compat lock lock-cuda \
	install clean

train: export OMP_NUM_THREADS ?= 1
train: export CUDA_VISIBLE_DEVICES ?= 0
train: install
	$(TRAIN) $(ARGS)
	$(TRAIN) $(ARGS) --control shuffled-advantages --output-dir runs/tiny-agent-control \
		--compare-with runs/tiny-agent/summary.json

# Every test that runs in pytest's own processes; `make e2e` runs the rest.
test: install
	$(PYTEST) -m "not e2e" $(ARGS)

# Tests of whole processes: training runs, ranks, servers, signals.
e2e: install
	$(PYTEST) -m e2e $(ARGS)

bench: export OMP_NUM_THREADS ?= 1
bench: install
	$(BIN)/python -m benchmarks $(ARGS)

# What only a GPU can show: about ten minutes on one. ARGS="--cpu" runs what a CPU can.
gpu-check: export CUDA_VISIBLE_DEVICES ?= 0
gpu-check: install
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

# ARGS are arguments of vLLM's own, such as ARGS="--max-logprobs 5".
serve: install
	$(BIN)/agent-vllm serve $(MODEL) --port $(PORT) $(if $(ARGS),-- $(ARGS))

# Many trajectories with seeded faults: nothing is lost, nothing is left behind.
soak: export OMP_NUM_THREADS ?= 1
soak: install
	PYTHONPATH=tests:examples $(BIN)/python -m stress.soak --engine scripted --num-trajectories 20000 $(ARGS)
	PYTHONPATH=tests:examples $(BIN)/python -m stress.soak --engine vllm --num-trajectories 500 $(ARGS)

# Ctrl-C and SIGTERM at random moments of a training run.
stops: export OMP_NUM_THREADS ?= 1
stops: install
	PYTHONPATH=tests:examples $(BIN)/python -m stress.stops $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# The documentation site, in site/. A broken link or a page without a place in the menu is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: install
	rm -rf dist
	$(BIN)/python -m hatchling build

# Install the wheel in a fresh environment and use it from another folder.
wheel-check: wheel
	$(BIN)/python .ci/check_wheel.py

# Known vulnerabilities of the locked packages, if the registry reports them.
audit:
	$(PYTHON) .ci/audit.py

# The tests against the oldest and newest TRL, transformers and datasets; writes docs/compatibility.md.
compat: install
	$(BIN)/python .ci/compat.py $(ARGS)

install: $(INSTALLED)

.venv/installed-cpu: requirements/cpu.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-deps $(TORCH_CPU) \
		|| $(BIN)/pip install -q --no-deps --index-url $(TORCH_CPU_INDEX) $(TORCH_CPU)
	$(BIN)/pip install -q --no-deps --require-hashes -r requirements/cpu.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

.venv/installed-cuda: requirements/cuda.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-deps --require-hashes -r requirements/cuda.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

# uv resolves the locks. It doesn't read pip's settings, so it gets pip's folder of wheels by name.
LOCK = $(BIN)/uv pip compile pyproject.toml requirements/data.txt --python-version 3.11 \
	--python-platform x86_64-manylinux_2_28 --extra mcp --extra peft --extra examples --extra docs \
	--extra dev --extra agent --system-certs --generate-hashes --no-annotate --no-header --quiet $(LOCK_ARGS)
TORCH_CPU_FROM := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--extra-index-url $(TORCH_CPU_INDEX))

# Every package of the CPU setup except torch, with hashes.
lock:
	$(BIN)/pip install -q uv
	echo "$(TORCH_CPU)" | $(LOCK) --extra cpu --constraints - -o requirements/cpu.lock \
		--excludes requirements/cpu-excludes.txt --no-emit-package torch $(TORCH_CPU_FROM) >/dev/null

# Every package of the CUDA setup, torch included. Resolved without a GPU.
lock-cuda:
	$(BIN)/pip install -q uv
	$(LOCK) --extra cuda -o requirements/cuda.lock >/dev/null

clean:
	rm -rf .venv runs build dist site
