"""Bytes that lie beyond fast memory: files read past the page cache, and read-ahead into a ring of slots."""
