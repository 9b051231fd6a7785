"""A worker that is several processes (`worker.group`): towards the server it is one, with one rank."""
