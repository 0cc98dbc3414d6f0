"""Ways to get from the rows that sequences lack to their next tokens: what one step of the engine does."""
