"""How many tokens to draft for a step: the depth that draws the most tokens a second, by what was accepted and how long steps took.

Pure: values in, a number out; nothing here reads a clock. Output never depends on it, only speed.

With acceptance a(i) of draft i given that all before it were accepted, a round of depth n draws 1 + a(1) + a(1) a(2) + .. tokens. Rates and times are
averages over the last rounds (exponential, so that a change of text shows within some dozens of rounds); a depth that was not tried lately is tried
again now and then, since its time and the acceptance of its last draft are guesses.
"""

from __future__ import annotations

MEMORY = 1 / 32  # weight of the newest round
TRIAL_ROUNDS = 64  # between two trials of a depth that looks worse
TRIAL_LENGTH = 4  # rounds of a trial: the first one pays for the change


class DepthPolicy:
    """Depth of the rounds of one batch or session. depth_max: 1 or more.

    Invariant: 0 <= every acceptance <= 1; the depth given is 0 to depth_max.
    """

    def __init__(self, depth_max: int):
        if depth_max < 1:
            raise ValueError(f"depth_max is {depth_max}, expected at least 1")
        self.depth_max = depth_max
        self._acceptance = [0.7] * depth_max  # of draft i + 1, given those before it
        self._step_us: list[float | None] = [None] * (depth_max + 1)
        self._rounds = 0
        self._depth, self._trial_left = min(3, depth_max), 0

    def heir(self) -> DepthPolicy:
        """A new one that knows what was accepted, and no times."""
        made = DepthPolicy(self.depth_max)
        made._acceptance, made._depth = self._acceptance.copy(), self._depth
        return made

    def depth(self) -> int:
        """For the next round."""
        return self._depth

    def add(self, depth: int, accepted: list[int], step_us: float | None) -> None:
        """A round of `depth` drafts was read: what each session accepted, and its time; None: it is not like others, but the first of its kind."""
        for count in accepted:
            for place in range(min(count + 1, depth)):
                self._acceptance[place] += MEMORY * ((1.0 if place < count else 0.0) - self._acceptance[place])
        if step_us is not None:
            before = self._step_us[depth]
            self._step_us[depth] = step_us if before is None else before + 4 * MEMORY * (step_us - before)
        self._rounds += 1
        if self._trial_left:
            self._trial_left -= 1
            if self._trial_left:
                return
        self._depth = self.best()
        if self._rounds % TRIAL_ROUNDS == 0:
            self._depth, self._trial_left = self._rounds // TRIAL_ROUNDS % (self.depth_max + 1), TRIAL_LENGTH

    def tokens(self, depth: int) -> float:
        """Tokens that a round of this depth draws on average."""
        total, chance = 1.0, 1.0
        for place in range(depth):
            chance *= self._acceptance[place]
            total += chance
        return total

    def time_us(self, depth: int) -> float | None:
        """Time of a round: as measured, else on the line through the nearest two depths that were; None with fewer."""
        if self._step_us[depth] is not None:
            return self._step_us[depth]
        known = [(abs(d - depth), d, us) for d, us in enumerate(self._step_us) if us is not None]
        if len(known) < 2:
            return None
        (_, a, a_us), (_, b, b_us) = sorted(known)[:2]
        return max(a_us + (b_us - a_us) * (depth - a) / (b - a), 0.1 * a_us)

    def best(self) -> int:
        """The depth of most tokens a second; the present one until two depths have been timed."""
        rates = [(self.tokens(depth) / us, depth) for depth in range(self.depth_max + 1) if (us := self.time_us(depth)) is not None]
        return max(rates)[1] if len(rates) > 1 else self._depth

    def check(self) -> None:
        """AssertionError if an invariant does not hold."""
        assert all(0.0 <= rate <= 1.0 for rate in self._acceptance), self._acceptance
        assert 0 <= self._depth <= self.depth_max, self._depth


class LoadPolicy:
    """A `DepthPolicy` for steps of 1, 2, 3 to 4, 5 to 8, .. rows: with many rows a step reads most weights anyway, and drafts pay less."""

    def __init__(self, depth_max: int):
        self._depth_max = depth_max
        self._by_size: dict[int, DepthPolicy] = {}

    def of(self, rows: int) -> DepthPolicy:
        """The one for steps of so many rows without their drafts. It begins with what a policy for the next smaller size has found."""
        size = (rows - 1).bit_length()
        if size not in self._by_size:
            smaller = [known for known in self._by_size if known < size]
            self._by_size[size] = self._by_size[max(smaller)].heir() if smaller else DepthPolicy(self._depth_max)
        return self._by_size[size]
