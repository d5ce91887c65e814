# make train   a real pretrained model learns to add; about 4 minutes of training on 2 cores
# make test    lint, types, import contracts, all CPU tests
# make test-sglang   the lane with a real SGLang on the CPU; makes an environment of 3.3 GB on first use
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_DIR ?=
SEED ?= 1234
ARGS ?=
# TORCH_INDEX= PyTorch's public CPU index saves a Linux machine without a GPU several GB
TORCH_INDEX ?=

.PHONY: train test test-sglang check fmt docs clean soak screenshots bench-e2e bench-engine bench-delta bench-full bench-trainer

$(VENV)/installed: requirements.lock requirements-torch.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

train: $(VENV)/installed
	$(BIN)/turnout train examples/quickstart.yaml --seed $(SEED) $(if $(RUN_DIR),--run-dir $(RUN_DIR)) $(ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check src tests benchmarks examples mkdocs_hooks.py
	$(BIN)/ruff format --check src tests benchmarks examples mkdocs_hooks.py
	$(BIN)/basedpyright
	$(BIN)/lint-imports

# in a process per core, one thread each: unit tests, and after them what starts processes itself, where a
# failing test is tried once more on its own port and folder; a second try is printed as RERUN
test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit -n 2 --dist loadfile $(ARGS)
	$(BIN)/pytest tests --ignore tests/unit -n 2 --dist loadfile --reruns 1 -rR $(ARGS)

test-sglang: $(VENV)/installed
	TURNOUT_TEST_SGLANG=1 $(if $(TORCH_INDEX),TORCH_INDEX=$(TORCH_INDEX)) $(BIN)/pytest tests/sglang $(ARGS)

# a run on an environment of the real verifiers; makes an environment of 600 MB on first use
.PHONY: test-verifiers
test-verifiers: $(VENV)/installed
	TURNOUT_TEST_VERIFIERS=1 $(BIN)/pytest tests/verifiers $(ARGS)

# long proofs that `make test` has no time for
soak: $(VENV)/installed
	$(BIN)/python -m tests.engine_bugs --schedules 10000 --json benchmarks/results/schedules.json
	$(BIN)/python -m tests.follower_kills --json benchmarks/results/follower_kills.json
	$(BIN)/python -m tests.resume_kills --kills 50 --free-kills 20 --json benchmarks/results/resume_kills.json
	$(BIN)/python -m tests.update_bugs --worlds 5000 --json benchmarks/results/update_worlds.json
	$(BIN)/python -m tests.weight_matrix --json benchmarks/results/weight_matrix.json
	$(BIN)/python -m benchmarks.simulate --seeds 10000 --json benchmarks/results/simulate.json
	$(BIN)/python -m tests.fleet_soak --minutes 60 --json benchmarks/results/fleet_soak.json

fmt: $(VENV)/installed
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

# the generated pages, then the site in build/site
docs: $(VENV)/installed
	$(BIN)/python -m turnout.config.reference docs/flags.md
	$(BIN)/python -m turnout.config.slime_page docs/coming-from-slime.md
	$(BIN)/python -m turnout.weights.state_tables docs/weights.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

# pictures of every view of the dashboard and of the panel, from real runs; needs Chromium
screenshots: $(VENV)/installed
	$(BIN)/python -m tests.screenshots

bench-%: $(VENV)/installed
	$(BIN)/python -m benchmarks.$* --json benchmark-$*.json $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
