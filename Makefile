# everlong: `make setup`, then `.venv/bin/everlong --help`. `make train` and `make test` do their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE_VENV := .venv-core
CORE_STAMP := $(CORE_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
SEAWEEDFS_VENV := .venv-seaweedfs
SEAWEEDFS_STAMP := $(SEAWEEDFS_VENV)/.installed
PYTEST := $(BIN)/python -m pytest

.PHONY: setup vllm seaweedfs train test unit loop system gvisor campaign campaign-sandboxes study-learning study-schedules study-stability pairs peers check format docs clean help

help:
	@echo "make setup   install everlong into $(VENV); the command is $(BIN)/everlong"
	@echo "make vllm    the environment of a vLLM server in $(VLLM_VENV), for engine.type=vllm"
	@echo "make seaweedfs  the S3 server of the system tests in $(SEAWEEDFS_VENV), 180 MB"
	@echo "make train   the quickstart: trains, evaluates, writes a report"
	@echo "make test    unit and loop tiers (what a change must pass)"
	@echo "make system  real servers and clients"
	@echo "make gvisor  fetches gVisor's runsc into a cache folder (sandbox.type=gvisor); skipped aloud where it cannot be had"
	@echo "make check   lint, types, import contracts"
	@echo "make study-learning  RL against more imitation and shuffled rewards, three seeds, about an hour"
	@echo "make study-schedules  the quickstart in rounds, partial, asynchronous and with vLLM, half an hour"
	@echo "make study-stability  losses, replay, projection, Muon and critic on stale data, 21 arms of minutes"
	@echo "make pairs   docs/pairs.md: which settings train together, and what refuses the others"
	@echo "make peers   what the benches engine, step and losses are measured against: transformers and TRL, 1.3 GB"
	@echo "make campaign  kill -9 campaign on a real run; writes docs/evidence/"
	@echo "make campaign-sandboxes  the same on processes that use sandboxes"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh "train,dev,smollm2,humaneval"
	@touch $(STAMP)

$(CORE_STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(CORE_VENV)" bash scripts/setup.sh ""
	@touch $(CORE_STAMP)

vllm: $(VLLM_STAMP)

$(VLLM_STAMP): constraints-vllm.txt scripts/setup_vllm.sh
	@PYTHON="$(PYTHON)" VENV="$(VLLM_VENV)" bash scripts/setup_vllm.sh
	@touch $(VLLM_STAMP)

seaweedfs: $(SEAWEEDFS_STAMP)

$(SEAWEEDFS_STAMP): scripts/setup_seaweedfs.sh
	@PYTHON="$(PYTHON)" VENV="$(SEAWEEDFS_VENV)" bash scripts/setup_seaweedfs.sh
	@touch $(SEAWEEDFS_STAMP)

train: $(STAMP)
	$(BIN)/everlong train

unit: $(STAMP)
	$(PYTEST) tests/unit

loop: $(STAMP) $(CORE_STAMP)
	EVERLONG_CORE_PYTHON=$(abspath $(CORE_VENV))/bin/python $(PYTEST) tests/loop

test: $(STAMP) $(CORE_STAMP)
	EVERLONG_CORE_PYTHON=$(abspath $(CORE_VENV))/bin/python $(PYTEST) tests/unit tests/loop

system: $(STAMP) gvisor
	$(PYTEST) tests/system
	EVERLONG_TEST_GVISOR=1 $(PYTEST) tests/unit/environments/sandboxes/test_sandbox_contract.py -k gvisor -rs

gvisor:
	@bash scripts/gvisor.sh

study-learning: $(STAMP)
	$(BIN)/python -m tests.study.learning

study-schedules: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python -m tests.study.schedules --vllm

study-stability: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.study.stability

pairs: $(STAMP)
	$(BIN)/python -m tests.loop.trainer.pairs > docs/.pairs.md
	mv docs/.pairs.md docs/pairs.md

campaign: $(STAMP)
	$(BIN)/python -m tests.campaign.kill --kills 10

campaign-sandboxes: $(STAMP) gvisor
	$(BIN)/python -m tests.campaign.sandboxes --kills 100

peers: $(STAMP)
	$(BIN)/python -m everlong.cli.benches.peers.environment

check: $(STAMP)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/ty check src tests/campaign tests/study tests/evidence.py
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

clean:
	rm -rf $(VENV) $(CORE_VENV) $(VLLM_VENV) $(SEAWEEDFS_VENV) .pytest_cache .ruff_cache .hypothesis
