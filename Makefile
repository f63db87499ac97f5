# Two commands for a newcomer: `make run` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# The oldest NVRTC that tilewave supports (PyTorch pins it): the compiler's tests run under it too.
OLD_NVRTC := .cache/nvrtc-13.0.88

.PHONY: run setup lint test test-long test-all resources wheel clean

run: setup
	$(BIN)/tilewave ladder

setup: $(READY)

# PyTorch's CPU build is not on every index: without it the tests of tilewave.torch are skipped, and no more.
$(READY): pyproject.toml requirements-test.lock requirements-torch.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-test.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-torch.lock \
		2>/dev/null || echo "PyTorch's CPU build is not to be had here, so tests of tilewave.torch are skipped;" \
		"to have it: $(BIN)/pip install --no-deps -r requirements-torch.lock" \
		"--extra-index-url https://download.pytorch.org/whl/cpu"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(OLD_NVRTC)/.ready: $(READY)
	rm -rf $(OLD_NVRTC)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLD_NVRTC) \
		nvidia-cuda-nvrtc==13.0.88
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(OLD_NVRTC)/.ready
	$(BIN)/pytest -n 2 -m "not long"
	TILEWAVE_NVRTC=$(OLD_NVRTC)/nvidia/cu13/lib $(BIN)/pytest -n 2 -m "not long" tests/compiler

# What `make test` leaves out for its length.
test-long: lint $(OLD_NVRTC)/.ready
	$(BIN)/pytest -n 2 -m long
	TILEWAVE_NVRTC=$(OLD_NVRTC)/nvidia/cu13/lib $(BIN)/pytest -n 2 -m long tests/compiler

test-all: test test-long

# The table of every rung's registers, spills and occupancy, by both compilers.
resources: $(OLD_NVRTC)/.ready
	$(BIN)/python benchmarks/resource_table.py --nvrtc $(OLD_NVRTC)/nvidia/cu13/lib

# A wheel that holds the kernels' machine code for every architecture, made by the NVRTC of the lock file.
wheel: setup
	rm -rf build/shipped dist
	TILEWAVE_CACHE_DIR=$(CURDIR)/.cache/programs $(BIN)/python -m tilewave.kernels.ship --archives build/shipped
	TILEWAVE_ARCHIVES=build/shipped $(BIN)/python -m build --wheel --no-isolation
	ls -l dist

clean:
	rm -rf $(VENV) .cache build dist
