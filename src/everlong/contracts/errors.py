"""Errors that cross rooms, and the named reasons by which an episode can end.

A failure of ours (infrastructure) never becomes a reward: `Reason.trustworthy` says whether a verdict may be believed.
"""

from enum import StrEnum


class EverlongError(Exception):
    """Anything that everlong raises on purpose. The message says what was expected, what came, and what to do."""


class SandboxError(EverlongError):
    """The sandbox failed, not the agent: it could not start, died, or could not be reached."""


class WorkspaceTooLarge(SandboxError):
    """The workdir cannot be copied since it holds more than its limits allow: the agent's doing, and no failure of ours."""


class VerifierError(EverlongError):
    """Grading did not give a verdict."""


class EngineError(EverlongError):
    """The engine could not answer a request."""


class RequestAborted(EngineError):
    """The request was aborted on purpose; what it sampled until then is lost to the caller and must be accounted for."""


class EngineLost(EngineError):
    """What computes for the engine is gone or hangs; nobody has seen an answer. `update` brings it back."""


class StaleWeights(EngineError):
    """An engine was asked for a policy version that it cannot reach from the one it holds."""


class StoreError(EverlongError):
    """The object store refused or could not be reached."""


class AlreadyExists(StoreError):
    """A create-only key is taken: somebody else committed it."""


class NotFound(StoreError):
    """No object has that key."""


class LedgerError(EverlongError):
    """A fact contradicts the ledger: a second terminal state, an event after the end, or tokens that do not add up."""


class WorkerDied(EverlongError):
    """The worker process ended or its socket closed while a call was waiting."""


class WorkerError(EverlongError):
    """A call broke in the worker for a reason that the contract does not name: a bug or a broken machine, so the run stops."""


class Reason(StrEnum):
    """Why an episode ended. One word per cause; `trustworthy` says whether its reward may teach."""

    DONE = "done"
    """The agent said it was finished."""
    TRUNCATED = "truncated"
    """The agent's final answer was cut at the limit of a turn."""
    TURN_LIMIT = "turn_limit"
    STALLED = "stalled"
    """Several turns in a row held neither a tool call nor an answer."""
    CONTEXT_FULL = "context_full"
    AGENT_TIMEOUT = "agent_timeout"
    SANDBOX_CRASH = "sandbox_crash"
    VERIFIER_TIMEOUT = "verifier_timeout"
    VERIFIER_CRASH = "verifier_crash"
    """The verifier ended without a usable verdict: no file, an empty one, not a number, not finite."""
    ENGINE_FAILURE = "engine_failure"
    HARNESS_CRASH = "harness_crash"
    NOTHING_SAMPLED = "nothing_sampled"
    """No turn and no token: the agent never reached the model."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    """The episode did not end before the batch had to close."""
    NEVER_BEGAN = "never_began"
    """Others held every slot until the deadline: not one turn was asked for."""

    @property
    def ordered(self) -> bool:
        """True where the run itself called the episode off."""
        return self in (Reason.CANCELLED, Reason.DEADLINE, Reason.NEVER_BEGAN)

    @property
    def trustworthy(self) -> bool:
        """True where the agent's own doing ended the episode, so that a verdict on what it left behind counts."""
        return self in _TRUSTWORTHY


_TRUSTWORTHY = frozenset(
    {
        Reason.DONE,
        Reason.TRUNCATED,
        Reason.TURN_LIMIT,
        Reason.STALLED,
        Reason.CONTEXT_FULL,
        Reason.AGENT_TIMEOUT,
    }
)
