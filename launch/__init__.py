"""The launcher: a plan of processes, a backend that starts them, a supervisor that watches."""
