# make demo   sets up everything, then shows a real run survive every kind of interruption
# make test   sets up everything (the first time it builds a Kubernetes control plane), then runs checks and tests
.DEFAULT_GOAL := help
.PHONY: help env demo test test-fast test-cluster check format plans bench bench-operator bench-maxtext bench-maxtext-compiled lab lab-demo lab-down manifests lock clean

RUN := .venv/bin/python
BY_FILE := --dist loadfile --no-loadscope-reorder
export PYTHONUNBUFFERED := 1

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

env:  ## make or refresh .venv from requirements/dev.txt
	@tools/make-environment requirements/dev.txt

demo: env  ## a real training run survives six kinds of interruption, with proof (demo-out/report.html)
	@$(RUN) examples/demo.py --out demo-out

check: env  ## format, lint, types, import contracts
	@.venv/bin/ruff format --check --quiet . || { echo "run: make format"; exit 1; }
	@.venv/bin/ruff check --quiet .
	@.venv/bin/mypy --no-error-summary
	@.venv/bin/lint-imports --no-cache | tail -n 2

format: env  ## rewrite files in the project's format
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix .

test-fast: env  ## unit tests: no processes, no cluster, no large programs
	@$(RUN) -m pytest tests/unit -q -n 2 --dist loadfile -m "not slow"

test-cluster: env  ## on a real Kubernetes control plane (the first time builds it: about 12 minutes)
	@$(RUN) -m tests.lab.build > /dev/null
	@$(RUN) -m pytest tests/cluster -q -n 2 $(BY_FILE) --durations=20

test: env check  ## everything: checks, unit tests, real processes, a real Kubernetes control plane
	@$(RUN) -m pytest tests/unit -q -n 2 --dist loadfile
	@$(RUN) -m tests.lab.build > /dev/null
	@$(RUN) -m pytest tests/local tests/cluster -q -n 3 $(BY_FILE) --durations=20

bench: env  ## the benchmarks that need no peer; each prints a ratio
	@$(RUN) benchmarks/run.py

bench-operator: env  ## on a lab of its own: how soon an operator of 50 runs reacts, and what it costs when nothing happens
	@$(RUN) -m tests.lab.build
	@$(RUN) benchmarks/operator_quiet.py
	@$(RUN) benchmarks/operator_reaction.py

bench-maxtext: env  ## installs MaxText beside us and compares step time and start-up
	@$(RUN) benchmarks/maxtext.py

bench-maxtext-compiled: env  ## compiles MaxText's 7B beside ours for three slices: memory, FLOPs, communication (half an hour of CPU)
	@nice -n 15 $(RUN) benchmarks/maxtext_compiled.py --markdown docs/beside-maxtext.md

lab: env  ## a real Kubernetes control plane with TPU nodes on this machine (first build: about 10 minutes)
	@$(RUN) -m tests.lab.build && $(RUN) -m tests.lab.up

lab-demo: env  ## the whole product on the lab: chart, run, preemption, shrinking, a dead host, proof
	@$(RUN) -m tests.lab.build && $(RUN) -m tests.lab.demo

lab-down: env  ## stop the lab
	@$(RUN) -m tests.lab.down

manifests: env  ## write what is made from the code and the chart: CustomResourceDefinition and plain manifests
	@$(RUN) -m orchestrator.crd
	@$(RUN) -m tools.render_manifests

plans: env  ## compile the train step for the slices of docs/plans.md that its table lacks (hours; can be stopped)
	@nice -n 15 $(RUN) -m trainer.preflight.fill

LOCK := UV_PYTHON_DOWNLOADS=never .tools/bin/uv pip compile --quiet --python .venv/bin/python --no-header --no-emit-index-url --universal --python-version 3.12
lock: env  ## compile the pinned requirement files from pyproject.toml
	@$(LOCK) --all-extras pyproject.toml -o requirements/dev.txt
	@$(LOCK) --extra gcs -c requirements/dev.txt pyproject.toml -o requirements/operator.txt
	@$(LOCK) --extra gcs --extra trainer --extra evaluation -c requirements/dev.txt pyproject.toml requirements/tpu.in -o requirements/trainer.txt
	@$(LOCK) -c requirements/dev.txt requirements/build.in -o requirements/build.txt

clean:  ## remove what the commands above made
	@rm -rf .venv .tools .cache demo-out bench-out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
