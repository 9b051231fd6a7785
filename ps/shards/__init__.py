"""A server in several processes: one decides, all carry out. The rule is in `ps/core/replication.py`; here is the
network.

    attend.py        the coordinator's side of the connection: shards register, call again, are lost
    link.py          a shard's side of it
    messages.py      messages beside events and digests
    server.py        a shard's process
    gather.py        collects the whole model and all rows of the tables, for files
"""
