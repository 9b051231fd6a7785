"""What is around a simulated run: machines, links, and how they are told."""
