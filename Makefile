# Run `make` for what there is. Everything happens in .venv, which `make setup` creates; nothing else is installed.

VENV := .venv
BASE_PYTHON ?= python3
PYTHON ?= $(VENV)/bin/python
WITHOUT ?=

SET_UP := $(VENV)/.set-up
OTHER_TORCHES := $(patsubst requirements/%.txt,%,$(wildcard requirements/torch-*.txt))
BENCHMARKS := $(sort $(filter-out %_cuda.py %/gpu.py %/compare.py,$(wildcard benchmarks/*.py)))
RUN_PARTS := $(VENV)/bin/python ci/run_parts.py
CALLS := $(wildcard src/opsmith/torch_library/capabilities/private/cpp/*)
KERNELS := $(shell find src/opsmith/kernels src/opsmith/ops -name '*.py' -o -name '*.h' -o -name '*.cpp')
BUILT := $(VENV)/.built

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup tour test test-all test-browser docs lint bench bench-compare gpu-test dist dist-check release clean

help:  ## what you are reading
	@echo "opsmith: a PyTorch operator, declared once."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Each sets up what it needs, so begin with any: 'make tour' shows opsmith, 'make test' shows that it works."
	@echo
	@echo "  make setup BASE_PYTHON=python3.12      the Python (3.11 or newer) that .venv is made from"
	@echo "  make gpu-test PYTHON=python3           an environment of yours that has pytest and torch for your GPU"
	@echo "  make test-torch-2.15                   the fast tests with one other version of torch, in an environment of its own"
	@echo "  make test-all WITHOUT=torch-2.11       leave parts out; the closing table says so"
	@echo
	@echo "make test-all installs other versions of torch, which are large on Linux:"
	@grep -oH '[0-9]* GB' $(OTHER_TORCHES:%=requirements/%.txt) | sed 's|requirements/\(.*\)\.txt:|  \1  |'

setup: $(BUILT)  ## create .venv with opsmith and everything that development uses

tour: $(BUILT)  ## see what opsmith does, on real input, start to end
	$(VENV)/bin/opsmith tour

test: $(BUILT)  ## lint, types, tests, examples and documentation: what must pass before a push (a quarter of an hour on two cores where all kernels are built first)
	$(RUN_PARTS) test

test-all: $(BUILT) $(patsubst %,.venv-%/.set-up,$(filter-out $(WITHOUT),$(OTHER_TORCHES)))  ## all of that, the slow tests, and the other versions of torch
	$(RUN_PARTS) test-all $(if $(WITHOUT),--without $(WITHOUT))

test-torch-%: .venv-torch-%/.set-up
	.venv-torch-$*/bin/python ci/run_parts.py test-all --only torch-$*

# Nothing is installed for it but Python packages: a browser is the machine's.
test-browser: $(SET_UP) .venv-docs/.set-up  ## the pages of a check and of a graph, and the site, in headless Chromium (two minutes)
	@for program in chromium chromedriver; do command -v $$program >/dev/null || { \
	  echo "test-browser: there is no $$program: sudo apt-get install chromium chromium-driver" >&2; exit 1; }; done
	$(RUN_PARTS) test-browser

docs: $(BUILT) .venv-docs/.set-up  ## the programs of the documentation, and its site in out/site
	$(RUN_PARTS) docs

lint: $(SET_UP)  ## ruff, the layers and mypy alone
	$(RUN_PARTS) test --only lint types

bench: $(BUILT)  ## run every benchmark in benchmarks/ that needs no GPU
	@$(if $(BENCHMARKS),,echo "bench: there is no benchmarks/*.py" >&2; exit 1)
	@set -e; for benchmark in $(BENCHMARKS); do echo "--- $$benchmark"; $(VENV)/bin/python "$$benchmark"; done

# WITH=COMMIT names another commit than the newest tag, or the one before where there is none; ONLY=overhead.py, the
# benchmarks to run.
bench-compare: $(SET_UP)  ## what became slower than at another commit, beyond the noise (10 minutes)
	$(VENV)/bin/python benchmarks/compare.py $(if $(WITH),--with $(WITH)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ONLY),--only $(ONLY))

# With PYTHON, nothing is installed: neither .venv nor opsmith.
gpu-test: $(if $(filter $(VENV)/bin/python,$(PYTHON)),$(SET_UP))  ## the tests that need a GPU
	@$(PYTHON) -c 'import torch; torch.cuda.is_available() or exit("gpu-test: the torch of $(PYTHON) sees no GPU")'
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

# The pure wheel builds kernels where they are needed; the other one has those of opsmith.ops, and its name says for which systems.
dist: $(SET_UP) .venv-dist/.set-up  ## source distribution, pure wheel and wheel with built kernels, checked, in dist/
	rm -rf dist
	$(VENV)/bin/python -m hatchling build --target sdist --target wheel
	HATCH_BUILD_HOOKS_ENABLE=1 $(VENV)/bin/python -m hatchling build --target wheel
	.venv-dist/bin/twine check --strict dist/*
	@echo "libgomp.so.1, libc10.so and libtorch_*.so are torch's, whatever this says of linux_x86_64; a repaired wheel has no usable kernels:"
	.venv-dist/bin/auditwheel show dist/*linux*.whl
	@ls -l dist

# Each wheel, and one that is made from the source distribution, with the torch that we develop with. Without a compiler
# only built kernels load.
dist-check: $(SET_UP)  ## install what is in dist/ into a new environment, and run opsmith there
	rm -rf build/dist-check
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist-check/wheel dist/*.tar.gz
	$(BASE_PYTHON) -m venv build/dist-check/env
	grep '^torch==' requirements/dev.txt > build/dist-check/torch.txt
	@set -e; for wheel in dist/*.whl build/dist-check/wheel/*.whl; do echo "--- $$wheel"; \
	  build/dist-check/env/bin/python -m pip install --quiet --constraint requirements/tests.txt --constraint build/dist-check/torch.txt "$$wheel[cli]"; \
	  build/dist-check/env/bin/python -m pip install --quiet --no-deps --force-reinstall "$$wheel"; \
	  (cd build/dist-check; export OPSMITH_CACHE="$$PWD/cache"; unset PYTHONPATH; env/bin/opsmith doctor; \
	   case "$$wheel" in *-any.whl) ;; *) \
	     CXX=no-compiler env/bin/opsmith doctor opsmith --json > doctor.json; env/bin/python ../../ci/built_kernels.py < doctor.json;; esac); done

release: $(SET_UP) .venv-dist/.set-up  ## make release VERSION=0.11.0: version, changelog, checked dist/, site, commit and tag
	$(VENV)/bin/python ci/release.py $(VERSION)

clean:  ## remove builds, caches and out/, but not the environments
	rm -rf build dist out .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -path ./.git -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -exec rm -rf {} +

# A file in each environment says when it was last brought up to date.
# The kernels of involution, which the tour uses, take half a minute to compile.

$(SET_UP): requirements/dev.txt requirements/tests.txt pyproject.toml src/opsmith/__init__.py $(CALLS)
	$(call make_environment,$(VENV),requirements/dev.txt,uv)

# Kernels of involution take half a minute each, and several tests would build them at once.
$(BUILT): $(SET_UP) $(KERNELS)
	$(VENV)/bin/python -c 'from opsmith.tour.operators import build_kernels; build_kernels()'
	@touch $@

.venv-dist/.set-up .venv-docs/.set-up: .venv-%/.set-up: requirements/%.txt
	test -x .venv-$*/bin/python || $(BASE_PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --requirement $<
	@touch $@

.venv-torch-%/.set-up: requirements/torch-%.txt requirements/tests.txt pyproject.toml src/opsmith/__init__.py $(CALLS)
	@sed -n 's/^# /torch-$*: /p' $<
	$(call make_environment,.venv-torch-$*,$<)

# uv needs a tenth of pip's processor time. It reads no settings of pip, as an index of your own: pip installs torch, the
# environments of other torches, and all that uv cannot.
UV := uv==0.13.9

# The pinned torch comes first; opsmith itself, in editable form, must then bring nothing along.
define make_environment
	@$(BASE_PYTHON) -c 'import sys; sys.version_info >= (3, 11) or exit("setup: $(BASE_PYTHON) is older than Python 3.11; name another one with BASE_PYTHON=")'
	test -x $(1)/bin/python || $(BASE_PYTHON) -m venv $(1)
	$(if $(3),$(1)/bin/python -m pip install --quiet --no-deps $(UV) $$(grep -oh '^torch==[^ ]*' $(2)))
	$(if $(3),$(1)/bin/uv pip install --quiet --python $(1)/bin/python --requirement $(2) ||) $(1)/bin/python -m pip install --quiet --requirement $(2)
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(1)/bin/python -m pip check
	@$(1)/bin/opsmith build --calls || echo "setup: calls are made in Python here"
	@touch $@
endef
