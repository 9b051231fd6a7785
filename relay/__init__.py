"""A relay (`ps-server --upstream`): the server of a region, and one worker of the run above, which joins regions."""
