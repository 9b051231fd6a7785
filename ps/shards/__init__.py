"""A server of several processes: the coordinator decides the order of events, and all shards carry them out.

`ps/core/run.py` defines the rules. This package is their network code.

    attend.py        the coordinator's side of the connection: shards register, call again, are lost; messages other
                     than events and digests
    link.py          a shard's side of the connection; collects the whole model and all rows of the tables, for files
    server.py        a shard's process
"""
