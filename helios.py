"""Helios: serve language models on less hardware than they seem to need."""
