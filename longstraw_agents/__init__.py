"""Reinforcement learning of language-model agents on long trajectories, with exact gradients.

Data flows one way: environment -> store -> segmenter -> trainer -> policy. Importing this package loads neither torch nor
transformers.
"""

__version__ = "0.1.0"
