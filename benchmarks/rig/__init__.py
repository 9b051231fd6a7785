"""What measurements are made with: real processes, players of many workers, turns."""
