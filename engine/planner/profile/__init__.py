"""Measuring a machine with the engine's own code, so that a plan is made from what the engine will do.

``machine.profile_machine`` measures, ``store`` keeps the result, ``identity`` tells whether it still fits the machine.
The last two need no torch.
"""
