"""Ray: a thin shell around the engine and the router, and what a caller needs to reach them."""
