"""Weights for replies: publications of whole versions, and references that are updated by differences."""
