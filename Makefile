# make demo     answers a question with real weights      make test         everything CI runs
# make demo PROMPT="…"                                    make test-oldest  a smoke subset on Python 3.11 and jax 0.10.2
# make test-slow    what takes minutes a test             make test-aot     every kernel for every target
# (test-slow and test-aot run whole what test samples; test-slow also runs the engine's tests on interpreted kernels)
# PYTHON=… chooses the interpreter; otherwise the newest that runs, from 3.11 up, makes .venv.

PROMPT ?= What is the capital of France?
PYTHON ?=
VENV ?= .venv
RUN = JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/python

.PHONY: demo test test-slow test-aot test-oldest browser lint format clean

$(VENV)/.base: pyproject.toml scripts/setup_venv.sh
	@scripts/setup_venv.sh "$(VENV)" "$(PYTHON)" ""
	@touch $@

$(VENV)/.test: pyproject.toml scripts/setup_venv.sh
	@scripts/setup_venv.sh "$(VENV)" "$(PYTHON)" "test,aot,store"
	@touch $@ $(VENV)/.base

demo: $(VENV)/.base
	@$(VENV)/bin/python scripts/demo.py --prompt="$$DEMO_PROMPT"
demo: export DEMO_PROMPT = $(PROMPT)

test: $(VENV)/.test lint browser
	$(RUN) -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not tpu"

test-slow: $(VENV)/.test
	XLA_FLAGS="--xla_backend_optimization_level=3" $(RUN) -m pytest -m "slow or matrix" --matrix=all
	$(RUN) -m pytest tests/engine --kernels=tpu -m "not slow"
	$(RUN) -m pytest tests/engine --kernels=gpu -m "not slow"

test-aot: $(VENV)/.test
	XLA_FLAGS="--xla_backend_optimization_level=3" $(RUN) -m pytest -m "aot" --aot=all

test-oldest:
	@scripts/setup_venv.sh .venv-oldest python3.11 "test"
	XLA_FLAGS="--xla_backend_optimization_level=3" JAX_PLATFORMS=cpu .venv-oldest/bin/python -m pytest -m "smoke"

browser:
	@scripts/setup_browser.sh

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format:
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-oldest build *.egg-info
