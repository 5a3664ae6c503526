#!/usr/bin/env bash
# collect_wheels.sh FOLDER: what the package imports beyond a machine's torch, numpy, tokenizers, pyarrow, transformers and tensorboard,
# as wheels for CPython 3.12 on Linux x86-64, at most 60 MB: this package itself (its metadata has the version that is recorded),
# pydantic with its core, blake3, orjson, msgspec, xxhash, accelerate for transformers' Trainer, and matplotlib for the page of a run.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?usage: collect_wheels.sh FOLDER}
python=${PYTHON:-.venv/bin/python}
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$folder" -c constraints.txt \
    pydantic pydantic-core annotated-types typing-inspection typing-extensions blake3 orjson msgspec xxhash accelerate psutil \
    matplotlib contourpy cycler fonttools kiwisolver pyparsing python-dateutil six
size=$(du -sm "$folder" | cut -f1)
echo "$folder: $size MB"
[ "$size" -le 60 ]
