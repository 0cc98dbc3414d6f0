"""The engine on a machine that is not there: its own executor, scheduler and rings on tensors without content, with a
clock that advances by what a hardware profile says each step takes.
"""
