"""How long will a step take? Remembered from earlier ones; the watchdog tells stuck from busy by it."""

from __future__ import annotations

_WEIGHT = 0.25
"""Of the newest measurement in the moving average."""

_UNMEASURED_SECONDS = 1.0
_UNMEASURED_SECONDS_PER_TOKEN = 0.05


class StepCosts:
    """Moving averages: seconds of a decode step by number of rows (in powers of two), and of a prefill token."""

    def __init__(self) -> None:
        self._decode_seconds: dict[int, float] = {}
        self._seconds_per_token: float | None = None

    def note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of `num_rows` rows that fed `num_tokens` tokens in all took `seconds`."""
        if num_tokens == num_rows:
            bucket = num_rows.bit_length()
            self._decode_seconds[bucket] = _averaged(self._decode_seconds.get(bucket), seconds)
        else:
            self._seconds_per_token = _averaged(self._seconds_per_token, seconds / num_tokens)

    def promise(self, num_rows: int, num_tokens: int) -> float:
        if num_rows == 0:
            return 0.0
        if num_tokens == num_rows:
            measured = self._decode_seconds.get(num_rows.bit_length())
            if measured is not None:
                return measured
            known = [seconds * max(1.0, num_rows / (1 << bucket)) for bucket, seconds in self._decode_seconds.items()]
            return max(known, default=_UNMEASURED_SECONDS)
        per_token = self._seconds_per_token
        if per_token is None:
            return _UNMEASURED_SECONDS + _UNMEASURED_SECONDS_PER_TOKEN * num_tokens
        return max(per_token * num_tokens, *self._decode_seconds.values(), 0.0) if self._decode_seconds else per_token * num_tokens


def _averaged(average: float | None, measured: float) -> float:
    return measured if average is None else average + _WEIGHT * (measured - average)
