#!/usr/bin/env bash
# Writes requirements.lock again with the newest versions that pyproject.toml allows. Needs `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m pip install -q pip-tools
.venv/bin/pip-compile -q --all-extras --strip-extras --generate-hashes --no-header --no-emit-index-url --no-emit-trusted-host \
  --no-emit-find-links --upgrade -o requirements.lock pyproject.toml
sed -i '1i # Exact versions of everything the project can install, for all extras, with hashes; `bash deploy/lock.sh` renews it.' requirements.lock
