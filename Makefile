# `make help` lists the targets. VENV=path uses another virtual environment, PYTHON=python3.12 another interpreter.
PYTHON ?= python3
VENV ?= .venv
# TensorFlow lives in an environment of its own.
TF_VENV ?= .venv-tf
BIN := $(VENV)/bin
# Tests run in JOBS processes, the tests of one file in one of them (they share what they build), in the order found.
JOBS ?= auto
RUN := PATH="$(abspath $(BIN)):$$PATH" MLFLOW_DISABLE_TELEMETRY=true $(BIN)/python
TF_RUN := PATH="$(abspath $(TF_VENV)/bin):$$PATH" $(TF_VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help env tf-env quickstart test test-all tf-test lint format repro gpu model ui pack compose records-check build wheel doctor clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## Make the virtual environment (says how torch is chosen)
	@$(PYTHON) stages/environment.py $(VENV)

tf-env: ## Make the virtual environment with TensorFlow, in TF_VENV (.venv-tf)
	@$(PYTHON) stages/environment.py $(TF_VENV) --tensorflow

quickstart: env ## Run the whole pipeline on the embedded data set, in build/quickstart/
	@$(RUN) -m stages.quickstart

test: env ## Run the tests (no GPU needed)
	@$(RUN) -m pytest -m "not slow" -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-all: env ## Run every test, the slow ones too
	@$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

tf-test: tf-env ## Run the tests of the TensorFlow binding in their own environment
	@$(TF_RUN) -m pytest tests/bindings/test_tf.py

lint: env ## Check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: env ## Format the Python code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

repro: env ## Reproduce the record of params.yaml on this machine (dvc repro)
	@$(RUN) -m dvc repro

gpu: env ## Record this machine's GPU beside the committed record (OVERRIDES="model=ms_marco")
	@$(RUN) -m stages.gpu $(OVERRIDES)

model: env ## Fine-tune the packaged encoder into a cross-encoder (side stage; STEPS=n tries n steps on the CPU)
	@$(RUN) -m stages.finetune $(if $(STEPS),--steps $(STEPS) machine=cpu workload.queries=10)

ui: env ## Open MLflow on every step and on the latest two runs (http://127.0.0.1:5000)
	@$(RUN) -m stages.ui

pack: env ## Write .source.json for a copy of this tree that leaves git behind
	@$(RUN) -m stages.pack

compose: env ## Write params.yaml from conf/
	@$(RUN) -m stages.compose

records-check: env ## Say which committed records are stale (STALE.md and the README's line)
	@$(RUN) -m stages.records_check

build: env ## Build libtilerank for every architecture
	@$(RUN) -m tilerank.kernels.build

wheel: env ## Build a wheel with the library in it, for every architecture (OPTIONS="--backend cpu": the reference)
	@$(RUN) -m stages.wheel $(OPTIONS)

doctor: env ## Check compiler, GPU and library with a sanity kernel
	@$(RUN) -m tilerank.cli doctor

clean: ## Remove what was built and the pipeline's data (not the records)
	rm -rf build dist data reports dvc_plots mlartifacts mlflow.db*
