"""A taskset of verifiers, as somebody would write one: sums, scored by the share of digits in the last reply."""

from __future__ import annotations

import verifiers.v1 as vf  # only in the environment of this lane


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def digits(self, trace: vf.Trace) -> float:
        text = trace.last_reply
        return sum(character.isdigit() for character in text) / max(1, len(text))


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 8


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        numbers = range(self.config.num_tasks)
        return [SumTask(SumData(prompt=f"{n} + {n} =", answer=str(2 * n)), self.config.task) for n in numbers]


__all__ = ["SumsTaskset"]
