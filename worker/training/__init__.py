"""Support for training loops: sessions, data, the optimizer, tasks and artificial delays."""
