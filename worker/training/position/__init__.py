"""A script's position: which of its batches are done, and the state it keeps beside the model."""
