"""From a machine and a model to a plan: hardware profiles, cost models, the search for a policy, and a simulator."""
