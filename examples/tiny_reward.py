"""A reward that even a tiny random model can learn in a few steps: the share of digits in its response."""


def share_of_digits(prompt: str, response: str, label: object, **metadata: object) -> float:
    """From 0 (no digit) to 1 (digits only); an empty response has 0."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
