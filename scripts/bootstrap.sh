#!/usr/bin/env bash
# Creates .venv with the runtime; a second call with nothing changed returns at once.
#   scripts/bootstrap.sh [EXTRAS]      extras of pyproject.toml to add, comma separated; dev: the test tools (default: none)
#   PYTHON=/path/to/python             the interpreter to use, instead of the first one that works
#   TORCH=cpu|cuda                     the build of torch in a new environment; default: cuda where nvidia-smi lists a GPU, else cpu
#   VENV=folder                        instead of .venv
#   TORCH_CPU_INDEX=URL                instead of PyTorch's own index of CPU builds
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:-}"
venv="${VENV:-.venv}"
cpu_index="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"

works() {   # run each candidate: version managers have names for versions that are not installed
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

stamp="$venv/.installed-$(cat pyproject.toml constraints.txt scripts/bootstrap.sh | cksum | tr ' ' '-')"
if works "$venv/bin/python"; then
    [ -f "$stamp-${extras//,/+}" ] && exit 0
    [ -z "$extras" ] && compgen -G "$stamp-*" >/dev/null && exit 0   # an installation with extras has the runtime too
fi

python="${PYTHON:-}"
if [ -n "$python" ]; then
    works "$python" || { echo "bootstrap: PYTHON=$python is not a working Python 3.11 to 3.13 with venv." >&2; exit 1; }
else
    for candidate in python3 python3.11 python3.12 python3.13 python; do
        if works "$candidate"; then python="$candidate"; break; fi
    done
    [ -n "$python" ] || { echo "bootstrap: no Python 3.11 to 3.13 with venv was found; install one, or set PYTHON." >&2; exit 1; }
fi

echo "bootstrap: $($python --version) -> $venv (extras: ${extras:-none}); the first time takes 2 to 10 minutes" >&2
works "$venv/bin/python" || "$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
build="${TORCH:-cpu}"
if [ -z "${TORCH:-}" ] && [[ "$(nvidia-smi -L 2>/dev/null || true)" == *GPU* ]]; then build=cuda; fi
[ "$build" = cpu ] || [ "$build" = cuda ] || { echo "bootstrap: TORCH=$build is not one of cpu, cuda." >&2; exit 1; }
echo "bootstrap: 1/2 torch, the $build build" >&2
# torch first, so that no other package can choose another build of it
answers() { timeout 20 "$venv/bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$1" 2>/dev/null; }
if [ "$build" = cuda ]; then
    pip install -c constraints.txt torch
elif answers "$cpu_index/torch/"; then
    pip install -c constraints.txt --index-url "$cpu_index" torch
else
    echo "bootstrap: $cpu_index does not answer; torch comes from the package index" >&2
    pip install -c constraints.txt torch
fi
installed=$("$venv/bin/python" -c 'import importlib.metadata as m
print(m.version("torch"), *("with CUDA" for d in m.distributions() if (d.name or "").startswith("nvidia-cublas")))')
echo "bootstrap: installed torch $installed; $venv takes $(du -sm "$venv" | cut -f1) MB" >&2
echo "bootstrap: 2/2 the other packages" >&2
pip install -c constraints.txt -e ".${extras:+[$extras]}"
rm -f "$venv"/.installed-*
touch "$stamp-${extras//,/+}"
echo "bootstrap: done; '. $venv/bin/activate' puts infini-llama on the path of a shell" >&2
