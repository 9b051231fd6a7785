"""Training of tasks: loading a task, its training steps, its learning rate, its initial weights."""
