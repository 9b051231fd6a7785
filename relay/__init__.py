"""A relay: the server of a region, which is one worker of the run above (`ps-server --upstream`)."""
