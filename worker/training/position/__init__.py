"""Where a script is: which of its batches are behind it, and what it remembers beside the model."""
