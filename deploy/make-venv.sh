#!/usr/bin/env bash
# Creates a virtualenv with the newest Python that is installed, at least 3.11. Usage: make-venv.sh FOLDER
set -euo pipefail
folder=$1

python=""
for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
  [ -n "$candidate" ] || continue
  if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "tiered_index needs Python 3.11 or later; none was found (set PYTHON=/path/to/python3)" >&2
  exit 1
fi

rm -rf "$folder"
if ! "$python" -m venv "$folder" 2>/dev/null; then
  # on Debian ensurepip is in a separate package
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "apt-get install -y python$version-venv"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "python$version-venv" >/dev/null
    rm -rf "$folder"
    "$python" -m venv "$folder"
  else
    echo "$python can't make virtualenvs; install its venv package (Debian: python$version-venv)" >&2
    exit 1
  fi
fi
echo "virtualenv with $("$folder/bin/python" --version) in $folder"
