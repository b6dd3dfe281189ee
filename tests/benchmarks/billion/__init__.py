"""A year of up to a billion messages: built, merged, audited, looked up, erased, expired and copied, and each answer
checked.
"""
