#!/usr/bin/env bash
# Finds the browser for the console's tests in PATH, or installs Debian's package if it may.
set -euo pipefail

find_it() {
  command -v chromium || command -v chromium-browser || command -v google-chrome
}

if found=$(find_it); then
  echo "browser for the console's tests: $found"
  exit 0
fi

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq
  if [ -n "$(apt-cache madison chromium 2>/dev/null)" ]; then
    echo "apt-get install -y chromium"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
    find_it >/dev/null && exit 0
  fi
fi
echo "the console's tests need Chromium (or Chrome) on PATH, and none was found: install one (Debian: chromium)" >&2
exit 1
