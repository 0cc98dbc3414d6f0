"""Which model and which replica serves a request: plain Python over dataclasses, no Ray and no torch."""
