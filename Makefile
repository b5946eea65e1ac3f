# make setup | demo | test | test-faults | soak | soak-noise | soak-simulation | exhaustive | fuzz | bench-kill | bench-operations | bench-allreduce | bench-model | scale | format
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup setup-bench demo test lint unit test-faults soak soak-noise soak-simulation exhaustive fuzz bench-kill bench-operations bench-allreduce bench-model scale format clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(VENV)/.ready  ## build .venv with everything that demo and tests need

$(VENV)/.ready: pyproject.toml constraints.txt hatch_build.py keepstep/runtime/pump.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "keepstep needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup-bench: $(VENV)/.ready-bench  ## also the peers that the benchmarks run

$(VENV)/.ready-bench: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	@touch $@

demo: setup  ## three replicas train, one is killed, the others go on, it catches up: summary and picture
	$(BIN)/keepstep demo

test: setup lint unit  ## everything that CI runs

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: setup
	$(BIN)/python -m pytest -m "not faults"

test-faults: setup  ## the long matrix on real processes: a kill in every phase, and every other fault
	$(BIN)/python -m pytest -m faults

SEEDS ?= 200000
FIRST ?= 0
soak-simulation: setup  ## SEEDS=200000 simulated worlds from FIRST=0 on, on two processes; the last line says what they came to
	$(BIN)/python -m keepstep.simulation --seeds $(SEEDS) --first $(FIRST) --processes 2

exhaustive: setup  ## every order of events in small simulated worlds: 3 replicas, 2 steps, at most 2 faults; a quarter of an hour
	$(BIN)/python -m keepstep.simulation.exhaustive --replicas 2 --steps 2 --faults 2
	$(BIN)/python -m keepstep.simulation.exhaustive --replicas 3 --steps 2 --faults 2 --coarse

FAILURES ?= 2000
soak: setup  ## training under FAILURES=2000 random failures: bits, ledger, leaks, loss; about an hour
	$(BIN)/python tests/processes/soak.py --failures $(FAILURES)

MINUTES ?= 60
soak-noise: setup  ## training for MINUTES=60 beside other work that comes and goes: nobody may be left out or ended
	$(BIN)/python tests/processes/soak_noise.py --minutes $(MINUTES)

SECONDS ?= 30
fuzz: setup  ## every parser of bytes from outside, guided by coverage, for SECONDS=30 each
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,fuzz]'
	$(BIN)/python tests/hostile/fuzz.py all $(SECONDS)

bench-kill: setup-bench  ## survivors' stall after a kill, beside torchft and plain gloo
	$(BIN)/python benchmarks/kill.py

bench-operations: setup  ## the same failures at three rates beside torchelastic: ETTR, stalls, units; about 15 minutes
	$(BIN)/python benchmarks/operations.py --json docs/results/operations.json --out runs/bench-operations
	cp runs/bench-operations/operations.png docs/results/

bench-allreduce: setup-bench  ## sums over 2 to 8 processes, beside gloo and torchft; as root for all of it
	$(BIN)/python benchmarks/allreduce.py --json runs/bench-allreduce/allreduce.json

bench-model: setup  ## the recovery-time model beside real jobs under kill -9; a quarter of an hour, on a quiet machine
	$(BIN)/python benchmarks/validate_model.py --json docs/results/validate_model.json

SHADOW_RANKS ?= 16
scale: setup  ## what docs/scale.md shows of 98,304 GPUs: model, plan, quorum; a rehearsal on 8 x SHADOW_RANKS=16 ranks; half an hour
	$(BIN)/keepstep simulate --sizes --json docs/results/simulate.json --out docs/results
	$(BIN)/keepstep plan --json docs/results/plan.json --out docs/results
	$(BIN)/keepstep plan --replicas 12 --topology examples/topology.toml
	$(BIN)/keepstep scale quorum --curve --json docs/results/quorum.json --out docs/results
	$(BIN)/keepstep shadow --replicas 8 --ranks-per-replica $(SHADOW_RANKS) --state-fraction 0.0001 \
		--json docs/results/shadow.json --fault "kill replica=3 rank=7 step=3 phase=in_exchange" \
		examples/train_fsdp.py -- --data keepstep --unit-size 64 --seq-len 32 --dim 4096 --layers 8 --steps 14

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
