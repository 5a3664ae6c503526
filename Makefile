# `make demo` and `make test` do all their set-up; they need Python 3.11 to 3.13, make and a package index.
.PHONY: demo test check docs slow faults exactness gpu bench clean

demo: setup
	.venv/bin/infini-llama run configs/tiny.yaml

# two processes of tests, a file to each: several machines' worth would make the tests of time limits fail; in the order of the
# folders, or a long file of a few tests would be the last one
test: setup
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

# the site, into build/site; a broken link or anchor fails
docs: setup
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict

# the full matrix of faults, workers and attentions (docs/testing.md)
slow: setup
	.venv/bin/python -m pytest -m slow

# N random faults against real runs, the same command again, and a comparison to the bit
N ?= 40
SEED ?= 1
faults: setup
	.venv/bin/python tests/integration/faults/harness.py --n $(N) --seed $(SEED)

# interrupted against uninterrupted, to the bit, over a pairwise cover of what a run can be; stores the result
exactness: setup
	.venv/bin/python tests/integration/exactness/whole.py

gpu: setup
	.venv/bin/python -m pytest -m gpu

bench: setup
	.venv/bin/python benchmarks/startup.py

.PHONY: setup
setup:
	@scripts/bootstrap.sh dev

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist build
