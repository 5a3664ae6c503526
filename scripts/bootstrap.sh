#!/usr/bin/env bash
# Makes .venv with everything the project needs; a second call with nothing changed returns at once.
#   scripts/bootstrap.sh [EXTRAS]      extras of pyproject.toml, comma separated (default: dev)
#   PYTHON=/path/to/python             the interpreter to use, instead of the first one that works
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:-dev}"

works() {   # a candidate is run, not just found: version shims answer to names they cannot serve
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

stamp=".venv/.installed-$(cat pyproject.toml constraints.txt scripts/bootstrap.sh | cksum | tr ' ' '-')-${extras//,/+}"
if [ -f "$stamp" ] && works .venv/bin/python; then exit 0; fi

python="${PYTHON:-}"
if [ -n "$python" ]; then
    works "$python" || { echo "bootstrap: PYTHON=$python is not a working Python 3.11 to 3.13 with venv." >&2; exit 1; }
else
    for candidate in python3 python3.11 python3.12 python3.13 python; do
        if works "$candidate"; then python="$candidate"; break; fi
    done
    [ -n "$python" ] || { echo "bootstrap: no Python 3.11 to 3.13 with venv was found; install one, or set PYTHON." >&2; exit 1; }
fi

echo "bootstrap: $($python --version) -> .venv (extras: $extras); the first time takes 2 to 10 minutes" >&2
works .venv/bin/python || "$python" -m venv --clear .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
echo "bootstrap: 1/2 torch" >&2
# torch first and by itself, so that nothing that follows can choose another build of it
pip install --quiet -c constraints.txt torch
echo "bootstrap: 2/2 all else" >&2
pip install --quiet -c constraints.txt -e ".[$extras]"
rm -f .venv/.installed-*
touch "$stamp"
echo "bootstrap: done; '. .venv/bin/activate' puts infini-llama on the path of a shell" >&2
