#!/usr/bin/env bash
# Finds redis-server in PATH, or installs Debian's package if it may. Tests are skipped, or fail if required, without it.
set -euo pipefail

command -v redis-server >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "apt-get install -y redis-server"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server; } >/dev/null || true
fi
command -v redis-server >/dev/null || echo "no redis-server (Debian: apt-get install redis-server): its tests can't run" >&2
