"""Group-wise quantisation (FlexGen, section 5): of weights, on the disk and in memory, and of the KV cache.

``scheme`` needs no torch and says how many bytes a quantised matrix takes; ``groups`` is the definition of the numbers;
``matrix`` multiplies by them; ``stored`` and ``copy`` are about model directories; ``kv`` is the cache's codec.
"""
