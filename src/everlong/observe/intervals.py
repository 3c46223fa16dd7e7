"""How sure a measured share is."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927), within [0, 1]; all of it where nothing was tried.

    It supposes independent trials: several attempts at the same task are more alike than that.
    """
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, Z_95**2 / trials
    middle = share + z2 / 2
    reach = Z_95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    return max(0.0, (middle - reach) / (1 + z2)), min(1.0, (middle + reach) / (1 + z2))


def success_text(share: float, trials: float) -> str:
    """A share in percent with its interval. Example: success_text(0.5, 150) is "50 % (42 to 58)"."""
    low, high = wilson_interval(share * trials, trials)
    return f"{100 * share:.0f} % ({100 * low:.0f} to {100 * high:.0f})"
