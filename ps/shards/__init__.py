"""A server in several processes: one decides, all carry out.

Shard 0, the coordinator, is the server that workers know: it seats them, runs the policy, ends the run. The
others hold their share of the model, take their part of every contribution, and report it. What has come
to all shards happens: the coordinator says so in one order of events, and every shard runs the same policy
over the same events and so makes the same decisions on its own part (state machine replication, Schneider
1990). So a step counts on all shards or on none, all are at one version at the same place of that order,
and snapshots taken there fit together.

    orders.py        what is said between them
    gather.py        what has come to which shard (pure)
    alone.py         a server of one process: what has come happens
    coordinator.py   shard 0
    follower.py      shards 1, 2, ...
    resharding.py    snapshots of some number of shards, for another number
    messages.py, attend.py, link.py, server.py   proto, gRPC, the process
"""
