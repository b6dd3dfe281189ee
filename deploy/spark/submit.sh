#!/usr/bin/env bash
# Submits a command of tiered-index to Spark. Options before `--` are those of spark-submit:
#
#   deploy/spark/submit.sh --master spark://host:7077 -- \
#     build --source s3://bucket/messages --storage s3://bucket/index --window 1d
#   deploy/spark/submit.sh --master yarn -- merge --storage s3://bucket/index --window 1d
#
# How the package reaches the executors:
#   TIERED_INDEX_ARCHIVE unset   each host has tiered_index at the same path as this one (an image, a shared folder)
#   TIERED_INDEX_ARCHIVE=FILE    Spark hands out and unpacks a packed environment (venv-pack, conda-pack)
# PYTHON is the driver's interpreter, by default .venv/bin/python or python3. In cluster mode the driver uses the
# executors' interpreter. Each host finds its own credentials by AWS's usual chain.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
[ -x "$python" ] || python=$(command -v "${PYTHON:-python3}")
submit=$("$python" -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent / "bin" / "spark-submit")') || {
  echo "$python has no PySpark: pip install '.[spark]' in a clone, or pip install 'FILE.whl[spark]' of its wheel" >&2
  exit 2
}

options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  options+=("$1")
  shift
done
[ $# -gt 1 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
shift

driver=$python
if [ -n "${TIERED_INDEX_ARCHIVE:-}" ]; then
  export PYSPARK_PYTHON=./environment/bin/python
  options+=(--archives "$TIERED_INDEX_ARCHIVE#environment")
  # a variable whose name begins with TIERED_INDEX_ is a setting to the command
  unset TIERED_INDEX_ARCHIVE
else
  export PYSPARK_PYTHON=${PYSPARK_PYTHON:-$python}
fi
# in cluster mode the driver runs on a node, with the executors' interpreter
case " ${options[*]} " in
  *" --deploy-mode"[\ =]"cluster "* | *[\ =]"spark.submit.deployMode=cluster "*) driver=$PYSPARK_PYTHON ;;
esac
export PYSPARK_DRIVER_PYTHON=$driver
# merge is no command of Spark alone: under spark-submit it runs on Spark
[ "$1" = merge ] || set -- spark "$@"
exec "$submit" "${options[@]}" "$here/job.py" "$@"
