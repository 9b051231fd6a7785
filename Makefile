# make demo: train the digits in four workers.   make test: every test.   make help: the rest.
PYTHON ?= python3
BIN := .venv/bin

# Programs and tests are compiled once, not by every process of every test.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-sample docker-test trainers trackers campaigns gpu-test gpu-packages docs docs-figures screenshots lint types proto bench overlap shards chaos combinations kill-points claims clean

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# One install for everything: torch exactly as the constraints say, first, so that
# no resolver picks a build of several GB.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "paramserver needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/installed  ## one server and four workers learn handwritten digits (ssp)
	$(BIN)/ps-launch configs/digits.yaml

# Most tests wait for processes they started: three at a time keep two cores busy.
test: .venv/installed  ## every test but the slow ones, 6 to 12 minutes on 2 cores
	$(BIN)/pytest -q -n 3 --dist worksteal -m "not slow and not campaign and not docker and not trainers and not gpu"

test-slow: .venv/trainers  ## of those that take longer one case each, about an hour: slow links, transports, kills, peers; ALL=1 every case
	$(BIN)/pytest -q -rs -n 2 --dist worksteal -m "slow and not campaign" $(if $(ALL),,--one-of-each test)

# What a change must pass to land. The hash of the commit draws the tests: SEED=HASH repeats a draw.
test-sample: .venv/installed  ## of test-slow one test of each file, about a quarter of an hour
	$(BIN)/pytest -q -rs -n 2 --dist worksteal -m "slow and not campaign" --one-of-each file $(if $(SEED),--sample-seed $(SEED))

# A process for each trainer, forked for every case: two at a time.
trainers: .venv/trainers  ## Lightning, Hugging Face and Accelerate through every mode and case, about 5 minutes
	$(BIN)/pytest -q -rs -n 2 -m trainers tests/trainers tests/docs

.venv/trainers: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,lightning,huggingface,ray]'
	@touch $@

trackers: .venv/trackers  ## TensorBoard, W&B, MLflow and trackio, each read back what a run told it
	$(BIN)/pytest -q -rs tests/ps/observe/test_trackers.py

.venv/trackers: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,tensorboard,wandb,mlflow,trackio]'
	@touch $@

# One at a time: the containers of each share the cores. -rs says why something was skipped.
docker-test: .venv/installed  ## docker/ built and run on a Docker engine, about 4 minutes; skipped, loudly, without one
	$(BIN)/pytest -q -rs -m docker tests/docker

campaigns: .venv/installed  ## every fault of docs/robustness.md in every mode, by the minute: about half an hour, as root; TRANSPORT=grpc is the other
	$(BIN)/pytest -q -n 2 --dist worksteal -m campaign --hypothesis-profile fresh --transport $(or $(TRANSPORT),direct)

# PYTHON= on the command line: that interpreter with its own torch, and nothing is installed.
DEVICE ?= cuda
GPU_PYTHON := $(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(BIN)/python)
gpu-test: $(if $(filter command line,$(origin PYTHON)),,.venv/installed)  ## on one GPU, at most 10 minutes; skipped, loudly, without; PYTHON=python3.12 with its own torch; DEVICE=cpu tries it out
	$(GPU_PYTHON) tests/gpu/run.py --device $(DEVICE)

# All that gpu-test needs but torch and numpy, for the interpreter of a machine that reaches no index.
FOR ?= 3.11
gpu-packages: .venv/installed  ## in build/gpu-packages-VERSION, for FOR=3.12: what an interpreter with nothing but torch lacks
	rm -rf build/gpu-packages-$(FOR)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --target build/gpu-packages-$(FOR) --python-version $(FOR) --only-binary :all: $$($(BIN)/python tests/gpu/run.py --requirements)

docs: .venv/docs  ## the site in build/site/VERSION, beside other versions; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/docs: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

docs-figures: .venv/installed  ## the pictures of docs/modes again
	$(BIN)/python -m paramserver.docs.making.figures

# Needs a Chromium, as the tests of the dashboard do.
screenshots: .venv/installed  ## make the pictures of docs/page.md again, of a real run
	KEEP_SCREENSHOTS=1 $(BIN)/pytest -q -rs tests/web/test_screenshots.py

lint: .venv/installed  ## ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: .venv/installed  ## mypy
	$(BIN)/mypy ps worker common launch integrations drills simulate benchmarks web catalog serve relay

# -Iparamserver/proto=proto gives the generated module its real import path.
proto: .venv/installed  ## generate the protobuf code again
	mkdir -p proto/.generated
	$(BIN)/python -m grpc_tools.protoc -Iparamserver/proto=proto --python_out=proto/.generated --pyi_out=proto/.generated --grpc_python_out=proto/.generated paramserver/proto/parameter_server.proto
	mv proto/.generated/paramserver/proto/* proto/ && rm -r proto/.generated

bench: .venv/installed  ## the figures of the README, measured here
	$(BIN)/ps-bench exchange && $(BIN)/ps-bench round && $(BIN)/ps-bench latency && $(BIN)/ps-bench scale && $(BIN)/ps-bench memory

# Needs root, ip and tc; says so and does nothing without.
overlap: .venv/installed  ## steps over a slow link, with and without policy.delayed_update, worker.overlap
	$(BIN)/python tests/overlap/measure.py
	$(BIN)/python tests/overlap/measure.py --deep --workers 1

# Needs root, ip and tc; says so and does nothing without.
shards: .venv/installed  ## 1, 2 and 4 shards on hosts with 1 Gbit/s each
	$(BIN)/python tests/shards/measure.py

chaos: .venv/installed  ## a job for a minute under random kills, pauses and broken connections, then the proof
	$(BIN)/ps-launch chaos --seconds 60 --seed 1

combinations: .venv/installed  ## a covering array of all options, each row with real processes, about half an hour: SEED=1
	$(BIN)/python -m paramserver.tests.combinations --seed $(or $(SEED),1)

kill-points: .venv/installed  ## 1,000 seeded kills of servers and workers, about an hour
	$(BIN)/python tests/chaos/kill_points.py --points 1000 --quiet

claims: .venv/installed  ## what papers claim about learning, tried out, hours; N="N4 N18": those of docs/claims.md
	$(BIN)/python -m paramserver.benchmarks.claims $(N)

clean:  ## forget what was built
	rm -rf .venv build *.egg-info
