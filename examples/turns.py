"""A sample of several turns for examples/pd.yaml: the model says something, its user asks for more, and so on."""

from __future__ import annotations

from turnout.rollout.episode import Episode

TURNS, TURN_TOKENS = 3, 24


async def generate(episode: Episode) -> None:
    """Three turns of the model, with a user's turn between two of them."""
    for number in range(TURNS):
        turn = await episode.generate(max_new_tokens=TURN_TOKENS)
        if number < TURNS - 1:
            digits = sum(char.isdigit() for char in turn.text)
            episode.append(f"\nuser: I see {digits} digits, give me more of them.\nassistant: ")
