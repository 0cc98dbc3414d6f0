"""Offline batches: lines of JSON in, lines of JSON out, to be interrupted and resumed at any point."""
