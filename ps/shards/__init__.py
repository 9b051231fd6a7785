"""A server in several processes: one decides, all carry out.

Shard 0, the coordinator, is the server that workers know: it seats them, runs the policy, ends the run. The
others hold their share of the model, take their part of every contribution, and report it. What has come
to all shards happens: the coordinator says so in one order of events, and every shard runs the same policy
over the same events and so makes the same decisions on its own part (state machine replication, Schneider
1990). So a step counts on all shards or on none, all are at one version at the same place of that order,
and snapshots taken there fit together.

    attend.py        the coordinator's side of the connection: shards register, call again, are lost
    link.py          a shard's side of it
    messages.py      what is said beside events and digests
    server.py        a shard's process
    collect.py       the whole model, for the file of final weights
    channel.py       connections from one shard to another

The rule itself, what has come to all shards happens, is in `ps/core/replication.py`, without a network.
"""
