# make demo | test | slow | check | format | docs | docs-serve | bench | results; each works on a
# fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test slow check format docs docs-serve bench results clean

demo: $(INSTALLED)
	$(BIN)/upgd demo

# Bytecode is kept even where the environment forbids it: tests start Python many times.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist worksteal

slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict upgd

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, in build/site. UPGD_DOCS_NOTEBOOKS=0 does not execute the tutorials.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

docs-serve: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --watch upgd --watch website

bench: $(INSTALLED)
	$(BIN)/python benchmarks/optimizer_step.py
	$(BIN)/python benchmarks/curvature_cost.py
	$(BIN)/python benchmarks/curvature_quality.py
	$(BIN)/python benchmarks/ledger.py
	$(BIN)/python benchmarks/scheduler.py

results: $(INSTALLED)
	$(BIN)/upgd results docs/results --page docs/paper.md --page README.md --page docs/index.md
	for folder in docs/results/arena/*/; do $(BIN)/upgd arena --page $$folder || exit 1; done

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
