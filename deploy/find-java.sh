#!/usr/bin/env bash
# Finds the Java that Spark needs (17 or 21) in JAVA_HOME or PATH, or installs Debian's package if it may.
set -euo pipefail

# prints the major version of a java program, or 0 if there is none: version "17.0.15", version "1.8.0_402"
major() {
  local text
  text=$("$1" -version 2>&1) || { echo 0; return; }
  sed -nE 's/.*version "(1\.)?([0-9]+).*/\2/p' <<<"$text" | head -n 1
}

java=java
[ -z "${JAVA_HOME:-}" ] || java=$JAVA_HOME/bin/java
found=$(command -v "$java" >/dev/null && major "$java" || echo 0)
if [ "${found:-0}" -ge 17 ]; then
  echo "Java $found for Spark: $(command -v "$java")"
  exit 0
fi

if [ -z "${JAVA_HOME:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq
  for package in openjdk-17-jre-headless openjdk-21-jre-headless; do
    if [ -n "$(apt-cache madison "$package" 2>/dev/null)" ]; then
      echo "apt-get install -y $package"
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null
      # an older Java may still be the default
      for home in /usr/lib/jvm/*-"${package:8:2}"-*; do
        [ "$(major java)" -ge 17 ] || ! command -v update-alternatives >/dev/null || update-alternatives --set java "$home/bin/java"
      done
      found=$(major java)
      [ "$found" -lt 17 ] || exit 0
      break
    fi
  done
fi
has="none was found"
[ "${found:-0}" = 0 ] || has="Java $found was found"
echo "Spark needs Java 17 or 21, and $has${JAVA_HOME:+ in JAVA_HOME=$JAVA_HOME}:" >&2
echo "install one (Debian: openjdk-17-jre-headless or openjdk-21-jre-headless) or set JAVA_HOME to it" >&2
exit 1
