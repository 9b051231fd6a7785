"""A worker of several processes (`worker.group`), which the server sees as one worker with one rank."""
