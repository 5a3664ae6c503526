#!/usr/bin/env bash
# Creates .venv with the runtime; a second call with nothing changed returns at once.
#   scripts/bootstrap.sh [EXTRAS]      extras of pyproject.toml to add, comma separated; dev: the test tools (default: none)
#   PYTHON=/path/to/python             the interpreter to use, instead of the first one that works
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:-}"

works() {   # run each candidate: version managers have names for versions that are not installed
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

stamp=".venv/.installed-$(cat pyproject.toml constraints.txt scripts/bootstrap.sh | cksum | tr ' ' '-')"
if works .venv/bin/python; then
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

echo "bootstrap: $($python --version) -> .venv (extras: ${extras:-none}); the first time takes 2 to 10 minutes" >&2
works .venv/bin/python || "$python" -m venv --clear .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
echo "bootstrap: 1/2 torch" >&2
# torch first, so that no other package can choose another build of it
pip install -c constraints.txt torch
echo "bootstrap: 2/2 the other packages" >&2
pip install -c constraints.txt -e ".${extras:+[$extras]}"
rm -f .venv/.installed-*
touch "$stamp-${extras//,/+}"
echo "bootstrap: done; '. .venv/bin/activate' puts infini-llama on the path of a shell" >&2
