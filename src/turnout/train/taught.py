"""On-policy distillation: advantages that pull the policy towards a teacher on the policy's own samples.

    A_t := A_t - coef (log pi(y_t) - log pi_teacher(y_t))
with log pi as the token was sampled: of one token the gradient of the reverse KL, KL(pi || pi_teacher), by its
samples (Agarwal et al. 2024, arXiv 2306.13649; Gu et al. 2024, arXiv 2306.08543). Without rewards A_t is 0 before,
so that it works alone; no later token counts for an earlier one (discount 0).
"""

from __future__ import annotations

from collections.abc import Sequence

from turnout.core.types import TrainSample, but


def taught(samples: Sequence[TrainSample], coef: float) -> list[TrainSample]:
    """The samples, each with log-probs of the teacher, with these advantages."""
    return [
        but(
            sample,
            advantages=tuple(
                advantage - coef * (mine - theirs)
                for advantage, mine, theirs in zip(
                    sample.advantages, sample.logprobs, sample.teacher, strict=True
                )
            ),
        )
        for sample in samples
    ]
