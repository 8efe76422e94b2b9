"""Every error that this project raises on purpose, in one tree.

Idea: a caller who wants to survive anything of ours catches `LongStrawError`; one who knows the standard library catches
`ValueError`, `KeyError` or `OSError`, because each class also derives from the standard exception that fits. A message says
what was wrong, what was received, and what to do. Parts add their own classes here, never elsewhere.
"""

from __future__ import annotations


class LongStrawError(Exception):
    """Root of all errors raised by LongStraw Agents."""


class ConfigError(LongStrawError, ValueError):
    """A setting is unknown, of the wrong type, or out of its range."""


class TokenError(LongStrawError, ValueError):
    """Token ids, masks or log-probabilities do not fit together."""


class GroupError(LongStrawError, ValueError):
    """A group cannot be trained on: it is empty, or nothing in it carries loss."""


class NonFiniteError(LongStrawError, ValueError):
    """A reward, log-probability, loss or gradient is NaN or infinite."""


class ModelError(LongStrawError, ValueError):
    """The model, or one of its layers or settings, is unknown or not supported."""


class AdapterError(LongStrawError, ValueError):
    """An adapter does not belong to the model, or the served version is not the asked one."""


class StaleStateError(LongStrawError, RuntimeError):
    """A state was captured under other weights, tokens or settings than those it is read with."""


class UpdateStoppedError(LongStrawError, RuntimeError):
    """An update stopped at the end of its piece, as was asked for; its journal holds what is done, and a new start goes on."""


class RankError(LongStrawError, RuntimeError):
    """Another process of the run died, hangs, or holds other weights; the run stops and can be resumed."""


class StoreError(LongStrawError):
    """The store could not do what was asked."""


class SchemaError(StoreError, RuntimeError):
    """The store's schema is newer than this version, or is not ours."""


class CorruptionError(StoreError, ValueError):
    """Stored bytes do not match their digest."""


class NotStoredError(StoreError, KeyError):
    """A run, group, trajectory or blob is not in the store."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class StoreFullError(StoreError, OSError):
    """The disk, or the store's quota, is full; nothing of the failed write remains."""


class EnvironmentFault(LongStrawError, RuntimeError):
    """An environment broke its contract (a reward that is not finite, a tool without a schema)."""


class ToolFault(LongStrawError, RuntimeError):
    """A tool call failed in a way that its caller should read about and may correct."""


class SandboxError(LongStrawError, RuntimeError):
    """The sandbox is missing or could not be built; nothing was run outside it."""


class PolicyError(LongStrawError, RuntimeError):
    """A policy could not sample."""
