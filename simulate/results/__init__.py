"""What simulated runs came to, for people and programs."""
