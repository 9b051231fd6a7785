"""What a task is trained with: its steps, their rates, the weights it begins with."""
