"""`ps-launch doctor`: what machines and the network between them allow, measured, and which mode that carries."""
