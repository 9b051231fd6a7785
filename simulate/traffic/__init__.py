"""The bytes that a simulated run sends."""
