# Two commands: `make demo` and `make test`. Each sets up all it needs in .venv; a second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SECONDS ?= 300

# Some virtual machines advertise AMX and then die in the first bf16 matrix product.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: help setup demo test check fuzz clean
help:
	@echo "make demo   a trainer and two followers around a bucket; prove that all hold the same bits"
	@echo "make test   linters, types, tests"
	@echo "make fuzz   hostile patches for SECONDS=$(SECONDS)"

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	@echo "== setting up $(VENV): about a minute, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	@echo "== compiling the kernels, once"
	$(BIN)/weightcast warm-up
	@touch $@

demo: setup
	@echo "== three processes around a folder that stands for a bucket: a trainer, two followers"
	$(BIN)/python examples/follow.py

check: setup
	@echo "== ruff and mypy"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	@echo "== tests"
	$(BIN)/pytest

fuzz: setup
	@echo "== hostile patches for $(SECONDS) s"
	$(BIN)/python tests/fuzz_wire.py --seconds $(SECONDS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
