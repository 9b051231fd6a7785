"""Descriptions of a model that server and workers share: its layout, its division among shards, its optimizer."""
