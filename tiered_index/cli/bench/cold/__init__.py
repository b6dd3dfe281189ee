"""What suite `cold` is made of: the stored files, the network before them, the patterns of access, and two tables
beside.
"""
