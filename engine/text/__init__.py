"""Between text and token ids: the tokenizer, streaming detokenisation, stop strings."""
