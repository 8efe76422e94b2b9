"""Policies: whatever turns the tokens so far into the next action. Importing this package loads no model library."""

from longstraw_agents.policies.sampling import Policy, Sample, SampleRequest, Sampling

__all__ = ["Policy", "Sample", "SampleRequest", "Sampling"]
