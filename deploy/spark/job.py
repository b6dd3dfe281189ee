"""The program for spark-submit. It runs one command, such as `job.py spark build --source ... --storage ...`.

`submit.sh` passes it to spark-submit.
"""

from tiered_index.cli.main import run

if __name__ == "__main__":
    run()
