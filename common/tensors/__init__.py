"""What all know of a model: its layout, its division among shards, its optimizer."""
