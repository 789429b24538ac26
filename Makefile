# `make` lists the targets. `make demo` and `make test` each do all the set-up on a machine that has only Python.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Torch is not in the lock, since the hash of a CPU build depends on who made it. Its own dependencies are in the lock.
# Other versions of torch bring gigabytes; where pip finds a CPU build of this one, it takes it.
# With an index that has CPU builds: make install TORCH_ARGS="--index-url <that index>"
TORCH ?= torch==2.13.0
TORCH_ARGS ?=

export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
# Where this is set, each of the many processes that tests start compiles all modules anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all check format lint types contracts stubs compiled-tests lock docs licences sbom audit chaos soak worlds workloads faults process-faults flower-seams flower-apps guides page-pictures report-picture fuzz foreign-hellos test-jetson-pythons bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## Set up .venv with pinned dependencies

$(VENV)/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes --only-binary :all: --requirement requirements.lock
	$(PIP) install $(TORCH_ARGS) $(TORCH)
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

demo: install ## Run federated rounds over a simulated fleet: out/simulate/report.html
	$(BIN)/wattfleet simulate

STATIC := format lint types contracts stubs
# Each test process computes on one core, and many tests wait: one process more than cores takes a quarter less time.
TEST_PROCESSES ?= $(shell expr $$(nproc) + 1)
# Tests make tens of thousands of small files, each synchronised: in memory, they take a quarter less time. 4 GB suffice.
IN_MEMORY := $(shell test -w /dev/shm && ! findmnt -no OPTIONS -T /dev/shm | grep -q noexec && \
  test "$$(df --output=avail /dev/shm | tail -1)" -gt 4000000 && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)
PYTEST := $(IN_MEMORY) OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest --numprocesses=$(TEST_PROCESSES) --dist=worksteal
# In a fresh clone, pytest compiles all tests: once beside the static checks, instead of in each test process.
BEFORE_TESTS := @$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(STATIC) compiled-tests

check: install ## Run the static checks and the unit tests
	$(BEFORE_TESTS)
	$(PYTEST) tests/unit

# A test that waits for real processes may fail on a busy machine: if only such tests failed, they run once more, alone.
test: install ## Run the static checks and the tests, without their slow forms
	$(BEFORE_TESTS)
	@rm -rf .pytest_cache
	$(PYTEST) --durations=10 || { test $$? -eq 1 && \
	  ! grep -qE '"tests/(unit|worlds)/' .pytest_cache/v/cache/lastfailed && \
	  echo "The tests that failed run once more, one at a time:" && $(PYTEST) --numprocesses=0 --last-failed -rfEp; }

test-all: install ## Run every check, the slow forms too
	$(BEFORE_TESTS)
	$(PYTEST) --durations=10 --slow

compiled-tests: install
	@find tests -name '*-pytest-*.pyc' | grep --quiet . || \
	  { collected=$$($(BIN)/pytest --numprocesses=0 --collect-only --quiet 2>&1) || { echo "$$collected"; false; }; }
format: install
	$(BIN)/ruff format --check
lint: install
	$(BIN)/ruff check
types: install
	$(BIN)/mypy
contracts: install
	$(BIN)/lint-imports
stubs: install
	PATH="$(abspath $(BIN)):$$PATH" proto/generate --check

lock: ## Pin dependencies and their hashes anew, after a change of pyproject.toml; ARGS="--upgrade" takes the newest
	PATH="$(abspath $(BIN)):$$PATH" dependencies/lock $(ARGS)

docs: install ## Build the documentation as a site: out/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "out/site/index.html"

licences: install ## Write docs/licences.md anew
	@mkdir -p out
	$(BIN)/python -m dependencies.licences > out/licences.md && mv out/licences.md docs/licences.md

sbom: install ## Write out/sbom.json: what is installed, as CycloneDX
	@mkdir -p out
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file out/sbom.json $(BIN)/python
	@echo "out/sbom.json"

audit: install ## Look dependencies up in a vulnerability database, where one can be reached
	$(BIN)/python -m dependencies.audit requirements.lock requirements-device.lock requirements-supernode.lock

chaos: install ## Kill agents, coordinators, and 200 times on each store everything together, at random moments
	CHAOS_KILLS=50 $(BIN)/pytest --slow --timeout=1800 tests/chaos/test_agent_chaos.py
	CHAOS_KILLS=50 $(BIN)/pytest --slow --timeout=1800 -s tests/chaos/test_coordinator_chaos.py
	CHAOS_KILLS=200 $(BIN)/pytest --slow -s tests/chaos/test_campaign.py

soak: install ## Let a fleet train for an hour (SOAK_S), and look for growth: out/soak/soak.csv, soak.png
	mkdir -p out/soak
	SOAK_S=$${SOAK_S:-3600} SOAK_OUT=out/soak $(BIN)/pytest --slow -s tests/soak

worlds: install ## Look for excess power in 30,000 random worlds of failures from WORLDS_FIRST: 45 minutes of one core
	WORLDS=30000 $(PYTEST) --timeout=7200 tests/worlds

workloads: install ## Let 100 devices train 20 workloads for an hour of virtual time: about 6 minutes of one core
	WORKLOADS_DEVICES=100 WORKLOADS_MINUTES=60 $(BIN)/pytest --timeout=7200 -s -k learn tests/worlds/test_many_workloads.py

faults: install ## Put every fault on every link of 20 devices, plaintext and TLS, with real times
	FAULTS_DEVICES=$${FAULTS_DEVICES:-20} $(BIN)/pytest --slow --numprocesses=4 --dist=worksteal --timeout=1800 -rP --ignore=tests/faults/test_processes.py tests/faults

process-faults: install ## Kill, restart and stop each process of a real fleet at each stage of a round: about an hour
	FAULTS_DEVICES=3 $(BIN)/pytest --slow --numprocesses=0 --timeout=1800 -rP tests/faults/test_processes.py

FLOWER ?= 1.42.0
flower-seams: install ## Tell in a minute what a release of Flower breaks: make flower-seams FLOWER=1.43.0
	$(PIP) install --upgrade --no-deps --target out/flower-$(FLOWER) flwr==$(FLOWER)
	PYTHONPATH=out/flower-$(FLOWER) $(PYTEST) tests/integration/flower/test_flower_seams.py tests/unit/flower \
	  $(addprefix tests/integration/flower/test_,supernode.py warm_processes.py strategies.py)

flower-apps: install ## Run Flower's own examples with the two lines and without: FLOWER_EXAMPLES=<their folder>, half an hour
	@test -d "$(FLOWER_EXAMPLES)" || { echo "FLOWER_EXAMPLES has to name the folder 'examples' of Flower's repository"; exit 2; }
	FLOWER_EXAMPLES="$(abspath $(FLOWER_EXAMPLES))" OMP_NUM_THREADS=1 $(BIN)/pytest --slow --numprocesses=6 --dist=worksteal -rs tests/flower_apps

guides: install ## Follow the guide for an app of one's own with its real programs: about a minute of two idle cores
	$(BIN)/pytest --slow --numprocesses=0 tests/integration/docs/test_your_app.py

page-pictures: install ## Take the pictures of the page in docs/images, with Debian's Chromium
	PAGE_PICTURES=docs/images $(BIN)/pytest --numprocesses=0 tests/integration/coordinator/test_page.py

report-picture: demo ## Take the picture of the report in docs/images, with Debian's Chromium
	REPORT_PICTURE=docs/images/report.png $(BIN)/pytest --numprocesses=0 -k picture tests/integration/simulation/test_report_html.py

fuzz: install ## Send hostile input to every RPC, socket and file reader for 60 s each; FUZZ_SEED replays one
	FUZZ_S=$${FUZZ_S:-60} FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)000} $(PYTEST) --timeout=1800 tests/fuzz

foreign-hellos: install ## Refuse 2,000 sessions that pose as another device: about 10 seconds
	FOREIGN_HELLOS=2000 $(BIN)/pytest --timeout=600 -s tests/integration/coordinator/test_foreign_hellos.py

test-jetson-pythons: ## Install the agent alone under Python 3.10 and 3.12 (JetPack 6 and 7), and test it
	PYTHON310="$(PYTHON310)" PYTHON312="$(PYTHON312)" tests/agent_alone

bench: install ## List the benchmarks
	@for module in benchmarks/[a-z]*.py benchmarks/*/__main__.py; do \
	  grep -q '__main__' $$module || continue; \
	  name=$${module#benchmarks/}; name=$${name%.py}; name=$${name%/__main__}; \
	  printf '  python -m benchmarks.%-16s %s\n' $$name "$$($(BIN)/python -c \
	    "import ast,sys; print(ast.get_docstring(ast.parse(open('$$module').read())).splitlines()[0])")"; \
	done

clean: ## Remove .venv, caches and reports
	rm -rf $(VENV) .venv-agent-alone out dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
