"""The OpenAI protocol: requests in, objects and event streams out, errors in its shape. Knows no Ray and no engine."""
