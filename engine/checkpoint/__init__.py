"""Checkpoints: safetensors read by offset, the layout of fused engine tensors, GGUF import and the model store.

``layout`` and ``store`` need no torch, so that planners, routers and command lines may import them alone.
"""
