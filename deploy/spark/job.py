"""What spark-submit is given: one command line of tiered-index, as `job.py spark build --source ... --storage ...` (see
submit.sh).
"""

from tiered_index.cli.main import run

if __name__ == "__main__":
    run()
