# Two commands: `make demo` and `make test`. Both use .venv and install the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
OUT := runs/demo
# Tests that need a browser, a GPU, a compiler or patience are run by name, not by default.
DESELECTED := browser or gpu or compile or soak

.PHONY: demo test browser soak lint types package notebooks clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("llmgeom needs Python 3.11 or later, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	@# torch first and by itself: asked for through another package, an unpinned one brings gigabytes of CUDA.
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

demo: .venv/installed
	$(BIN)/llmgeom scan --out $(OUT)

test: .venv/installed
	$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder -m 'not ($(DESELECTED))'
	@echo "deselected marks: browser, gpu, compile, soak (run one with: make browser, make soak, or pytest -m gpu)"

browser: .venv/installed
	$(BIN)/python -m pytest -q -m browser

soak: .venv/installed
	$(BIN)/python -m pytest -q -m soak

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/python -m tests.package types

package: .venv/installed
	$(BIN)/python -m tests.package install

notebooks: .venv/installed
	$(BIN)/python -m tests.notebooks

clean:
	rm -rf .venv build dist *.egg-info runs notebooks/runs
