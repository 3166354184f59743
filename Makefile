# PYTHON      Python 3.10 to 3.13 that .venv is made with (default: that of the .venv that is there, else python3)
# DETECTRON2  where Detectron2 comes from: git+https address, folder or wheel (default: see requirements/setup_env.py)
# ARGS        more arguments for pytest or the demo
PYTHON ?=
DETECTRON2 ?=
ARGS ?=

RUN = .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-gpu lint format demo

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@sed -n 's/^# /  /p' $(firstword $(MAKEFILE_LIST))

setup: ## Make .venv with everything at fixed versions; a second call takes a moment
	@$(or $(PYTHON),python3) requirements/setup_env.py --python '$(PYTHON)' --detectron2 '$(DETECTRON2)'

test: setup ## Run the tests, but for those marked slow
	$(RUN) -m pytest $(ARGS)

test-slow: setup ## Run the tests that are marked slow
	$(RUN) -m pytest -m slow $(ARGS)

test-gpu: setup ## Run the tests that need a GPU, and measure what blocks cost on it
	$(RUN) -m pytest -m gpu $(ARGS)
	$(RUN) -m nonlocal_det.tools.benchmark --device cuda

lint: setup ## Check style, format, and which part imports which
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	.venv/bin/lint-imports --no-cache --no-logo

format: setup ## Put the code into the format that lint asks for
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

demo: setup ## Train and draw on the built-in data set, on any machine
	$(RUN) -m nonlocal_det.tools.quick_demo $(ARGS)
