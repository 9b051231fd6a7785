"""Machines and links of a simulated run, and the flags that describe them."""
