"""How many bytes a simulated run sends."""
