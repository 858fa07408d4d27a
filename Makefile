# Two commands do everything: `make train` and `make test`. Both set up .venv first.

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
ARGS ?=

# The server of `make serve`: the tiny agent, unless MODEL says another.
PORT ?= 8000
TINY_AGENT := from tiny_agent import tiny_agent_path; print(tiny_agent_path())
MODEL ?= $(shell PYTHONPATH=examples $(BIN)/python -c "$(TINY_AGENT)" 2>/dev/null | tail -n 1)

.PHONY: train test bench serve soak stops audit lint lock install clean

train: export OMP_NUM_THREADS ?= 1
train: install
	$(TRAIN) $(ARGS)
	$(TRAIN) $(ARGS) --control shuffled-advantages --output-dir runs/tiny-agent-control \
		--compare-with runs/tiny-agent/summary.json

test: install
	$(BIN)/python -m pytest $(ARGS)

bench: export OMP_NUM_THREADS ?= 1
bench: install
	$(BIN)/python -m benchmarks $(ARGS)

# ARGS are arguments of vLLM's own, such as ARGS="--max-logprobs 5".
serve: install
	$(BIN)/agent-vllm serve $(MODEL) --port $(PORT) $(if $(ARGS),-- $(ARGS))

# Many trajectories with faults by a seed: nothing lost, nothing left behind.
soak: export OMP_NUM_THREADS ?= 1
soak: install
	$(BIN)/python -m benchmarks.soak --engine scripted --num-trajectories 20000 $(ARGS)
	$(BIN)/python -m benchmarks.soak --engine vllm --num-trajectories 500 $(ARGS)

# Ctrl-C and SIGTERM at random moments of a training run.
stops: export OMP_NUM_THREADS ?= 1
stops: install
	$(BIN)/python -m benchmarks.stops $(ARGS)

# Known vulnerabilities of the locked packages, where the registry tells of them.
audit:
	$(PYTHON) .ci/audit.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

install: $(INSTALLED)

.venv/installed-cpu: requirements/cpu.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-deps $(TORCH_CPU) \
		|| $(BIN)/pip install -q --no-deps --index-url $(TORCH_CPU_INDEX) $(TORCH_CPU)
	$(BIN)/pip install -q --no-deps --require-hashes -r requirements/cpu.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

.venv/installed-cuda: requirements/data.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -e '.[cuda,mcp,peft,examples,dev]'
	$(BIN)/pip install -q --no-deps -r requirements/data.txt
	touch $@

# Every package of the CPU set-up but torch, with hashes. pyproject.toml says what is left out.
# uv doesn't read pip's settings: a folder of wheels that pip has is named to it.
LOCK_TORCH := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--extra-index-url $(TORCH_CPU_INDEX))
lock:
	$(BIN)/pip install -q uv
	echo "$(TORCH_CPU)" | $(BIN)/uv pip compile pyproject.toml requirements/data.txt -c - -o requirements/cpu.lock \
		--extra cpu --extra mcp --extra peft --extra examples --extra docs --extra dev \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 --system-certs $(LOCK_TORCH) \
		--generate-hashes --no-emit-package torch --no-annotate --no-header $(LOCK_ARGS)

clean:
	rm -rf .venv runs
