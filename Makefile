# Two commands are enough: `make demo` and `make test`. Both set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install -q -c constraints.txt

.PHONY: demo test test-slow figures docs check record-demo record-fresh-clone record-kills clean

demo: $(VENV)/installed
	$(VENV)/bin/longstraw demo $(ARGS)

test: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest $(ARGS)

# The full matrices; `make test` leaves them out.
test-slow: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -m slow $(ARGS)

# Longer sets that write figures: each says at its top what it measures.
record-demo: $(VENV)/installed
	$(VENV)/bin/python benchmarks/demo_trials.py --record

record-fresh-clone: $(VENV)/installed
	$(VENV)/bin/python benchmarks/fresh_clone.py --record

record-kills: $(VENV)/installed
	$(VENV)/bin/python benchmarks/training_kills.py --record

figures: $(VENV)/installed
	$(VENV)/bin/longstraw figures

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict -q

check: $(VENV)/installed-dev
	bash .ci/run

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "LongStraw Agents needs Python 3.11 or later, and $(PYTHON) is older: make PYTHON=python3.12 demo"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One pip call for all: pip then settles on the CPU build of torch that constraints.txt names.
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (about two minutes, once)"
	$(PIP) -e '.[gguf,viewer]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) with the tools of development (about three minutes, once)"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist site
