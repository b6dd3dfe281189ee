"""What suite `spark` is made of: its amounts and messages, the jobs in processes of their own, Parquet beside it,
memory, and a year.
"""
