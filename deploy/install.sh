#!/usr/bin/env bash
# Installs tiered_index from this clone into a virtualenv. Usage: install.sh FOLDER EXTRA,... [OPTION OF PIP ...]
#
# The packages have the versions of requirements.lock, and pip checks their hashes. `-e` as an option of pip leaves the
# package in the clone, for development.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1/bin/python extras=$2
shift 2

files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT
# shellcheck disable=SC2086
"$python" deploy/locked.py hashes ${extras//,/ } >"$files/hashes.txt"
"$python" deploy/locked.py pins >"$files/pins.txt"
target=() options=()
for option in "$@"; do
  if [ "$option" = -e ]; then target=(-e); else options+=("$option"); fi
done
pip=("$python" -m pip install -q --disable-pip-version-check ${options[@]+"${options[@]}"})
"${pip[@]}" --no-deps --require-hashes -r "$files/hashes.txt"
# builds the package; installs what another version of Python needs besides
"${pip[@]}" -c "$files/pins.txt" ${target[@]+"${target[@]}"} ".[$extras]"
