"""Tools of the measurements: real processes, simulated workers, turns."""
