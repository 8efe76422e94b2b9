"""Environments: gymnasium tool-use environments, their tools and the sandbox."""
