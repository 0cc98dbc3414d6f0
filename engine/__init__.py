"""How one model runs: weights, KV cache, sweeps, sampling. Knows no Ray, no HTTP and no other model."""
