# Every target does its own set-up: on a fresh machine nothing has to be run by hand before.
SHELL := /bin/bash
BIN := .venv/bin
# Nothing here asks a hub for models or data.
export HF_HUB_OFFLINE ?= 1

.PHONY: setup demo test test-ui test-slow test-kill sync-faults lint bench bench-kv bench-correction bench-curves bench-resume bench-orchestration gpu-check clean

setup:
	@infra/setup.sh

demo: setup  ## train two precision arms on the tiny task and compare them
	$(BIN)/fp8rl demo

test: setup  ## all that fits: unit, contract and pipeline tests
	$(BIN)/pytest tests/unit -n 2 -m "not slow"
	$(BIN)/pytest tests/contract -n 2 --dist loadfile -m "not slow and not gpu"
	$(BIN)/pytest tests/pipeline -n 2 --dist loadfile -m "not slow and not kill"
	$(BIN)/pytest tests/ui -m "not slow and not ui"

test-ui: setup  ## Prefect's and MLflow's pages in a browser; needs playwright and Chromium
	$(BIN)/pytest -m ui

test-slow: setup  ## the rest: the whole learning run, both arms, minutes long
	$(BIN)/pytest -m slow

test-kill: setup  ## kill every process of a run at every step; writes docs/kill_matrix.md
	FP8RL_WRITE_KILL_MATRIX=1 $(BIN)/pytest -m kill

sync-faults: setup  ## every fault of a weight or scale sync; writes its outcomes as JSON
	FP8RL_WRITE_SYNC_FAULTS=1 $(BIN)/pytest tests/contract/test_sync_faults.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup  ## timings, as JSON under benchmarks/results/
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.numerics
	$(BIN)/python -m benchmarks.mismatch
	$(BIN)/python -m benchmarks.parity

bench-kv: setup  ## an FP8 KV cache beside a BF16 one of the same bytes, and what its scales are worth
	$(BIN)/python -m benchmarks.kv_pressure
	$(BIN)/python -m benchmarks.kv_scales

bench-correction: setup  ## ways to correct an FP8 rollout, trained side by side
	$(BIN)/python -m benchmarks.correction

bench-curves: setup  ## the mismatch of every arm over 30 iterations
	$(BIN)/python -m benchmarks.curves

bench-resume: setup  ## what a kill costs on SmolLM2
	$(BIN)/python -m benchmarks.resume

bench-orchestration: setup  ## what Prefect, MLflow and the journal cost an iteration
	$(BIN)/python -m benchmarks.orchestration

gpu-check:  ## FP8 products and quantiser on a Hopper card; needs PyTorch, NumPy and this folder only
	python3 infra/gpu_check.py --out docs/gpu_check.md

clean:
	rm -rf .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
