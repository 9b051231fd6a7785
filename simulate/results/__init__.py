"""Results of simulated runs, for people and programs."""
