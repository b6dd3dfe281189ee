"""RocketMQ's remoting protocol: its tools ask, index and archived segments answer.

May import archive, follow, log.
"""
