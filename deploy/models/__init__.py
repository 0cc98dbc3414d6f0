"""Getting models into the store: the catalogue, pulling, importing, and ``helios models``."""
