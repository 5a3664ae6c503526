#!/usr/bin/env bash
# `make quick` with each of Python 3.11, 3.12 and 3.13 that is installed, on PATH or below pyenv's folder; all are tried, then it fails
# if one did, or if none is installed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
shopt -s nullglob
failed=() tried=()
for version in 3.11 3.12 3.13; do
    for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python "python$version"; do
        "$python" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" >/dev/null 2>&1 || continue
        echo "== $("$python" --version) ($python)"
        tried+=("$version")
        PYTHON="$python" make quick VENV=".venv-$version" || failed+=("$version")
        break
    done
done
[ "${#tried[@]}" -gt 0 ] || { echo "pythons: none of Python 3.11, 3.12 and 3.13 is installed." >&2; exit 1; }
echo "pythons: tried ${tried[*]}; failed: ${failed[*]:-none}"
[ "${#failed[@]}" = 0 ]
