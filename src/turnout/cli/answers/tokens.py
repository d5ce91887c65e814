"""One token of a response: its text, who made it with which weights, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from turnout.cli.answers.groups import state_text, version_of, version_text
from turnout.cli.answers.run import Answer, Run, number_of
from turnout.core.errors import ConfigError, Fault
from turnout.core.types import Trajectory

AROUND = 8  # tokens before and after it that are shown


def place(text: str | None, group: str | None, member: int | None) -> tuple[str, int, int]:
    """(group, member, token) of `ID:M:T`, or of a number beside the other two; raises ConfigError."""
    first, *rest = (text or "").split(":")
    if len(rest) == 2 and group is None and member is None:
        named, number = map(number_of, rest)
        if named is not None and number is not None:
            return first, named, number
    if not rest and group is not None and member is not None and (number := number_of(first)) is not None:
        return group, member, number
    remedy = "give --token GROUP:MEMBER:TOKEN, as g00000012.0:3:17, or --group, --member and --token"
    raise ConfigError(Fault("--token", text or "", "names no token", remedy))


def token(run: Run, group: str, member: int, number: int) -> Answer:
    """Numbers count from 0; raises ConfigError where there is no such token."""
    row = run.ledger.row(run.ids(group)[-1])
    pieces = [piece for piece in run.ledger.pieces(row.group_id) if piece["member"] == member]
    if not pieces:
        known = sorted({piece["member"] for piece in run.ledger.pieces(row.group_id)})
        which = (
            f"members {known[0]} to {known[-1]} have tokens" if known else "none of its members has tokens"
        )
        raise ConfigError(Fault("--member", str(member), f"{row.group_id} has no such member: {which}"))
    count = sum(tokens for piece in pieces for tokens, _ in piece["versions"])
    if not 0 <= number < count:
        reason = f"member {member} of {row.group_id} has {count} tokens"
        raise ConfigError(Fault("--token", str(number), reason, f"give 0 to {count - 1}"))
    version = _at([part for piece in pieces for part in piece["versions"]], number)
    made = run.ledger.members(row.group_id).get(member)
    of = version_of(run, version, row.trained)
    config = run.config
    stale = of["lag"] is not None and of["lag"] > config.get("max_staleness", of["lag"])
    return {
        "group": row.group_id,
        "member": member,
        "token": number,
        "of": count,
        **of,
        "masked_as_stale": stale and config.get("staleness_policy") == "mask",
        "engine": _at([part for piece in pieces for part in piece["engines"]], number),
        "group_state": row.state.value,
        "cause": row.cause,
        "trained": row.trained,
        "reward": pieces[-1]["reward"],
        "finish": pieces[-1]["finish"],
        **_stored(run, made, number),
    }


def _at(runs: Sequence[tuple[int, str]], number: int) -> str:
    """The name of the run that a token lies in; empty where there is none."""
    for tokens, name in runs:
        if number < tokens:
            return name
        number -= tokens
    return ""


def _stored(run: Run, made: Trajectory | None, number: int) -> Answer:
    """What goes with the tokens once they are forgotten."""
    told: Answer = {"stored": made is not None}
    if made is None:
        return told
    mixed = bool(made.kv_mixed) and bool(made.kv_mixed[number])
    told |= {
        "token_id": made.response_ids[number],
        "logprob": made.logprobs[number],
        "mask": made.loss_mask[number],
        "kv_mixed": mixed,
    }
    folder = _tokenizer_folder(run)
    if folder is None:
        return told
    before, piece, after = _texts(folder, made.response_ids, number)
    return told | {"before": before, "text": piece, "after": after}


def _tokenizer_folder(run: Run) -> Path | None:
    from turnout.train.model_zoo import at_hand

    named = run.config.get("hf_checkpoint")
    folder = at_hand(str(named)) if named else None
    return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


def _texts(folder: Path, ids: Sequence[int], number: int) -> tuple[str, str, str]:
    """What stands before a token, its own piece, and what follows."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = max(0, number - AROUND)

    def text(stop: int) -> str:
        return tokenizer.decode(list(ids[first:stop]), skip_special_tokens=False)

    before, upto, whole = text(number), text(number + 1), text(number + 1 + AROUND)
    return before, upto[len(before) :], whole[len(upto) :]


def token_lines(told: Answer) -> Iterator[str]:
    yield f"token {told['token']} of {told['of']}, member {told['member']} of group {told['group']}"
    if told.get("text") is not None:
        yield f"  text       {told['text']!r}, after {told['before']!r}, before {told['after']!r}"
    if told["stored"]:
        yield f"  id         {told['token_id']}"
        yield f"  log-prob   {told['logprob']:.6f} as sampled"
        why = " (made on KV of older weights too)" if told["kv_mixed"] else ""
        yield f"  mask       {told['mask']}: {'may train' if told['mask'] else 'carries no loss'}{why}"
    else:
        yield "  its id, log-prob and mask are forgotten: they are kept until its group has trained for good"
    yield f"  version    {version_text(told)}"
    if told["masked_as_stale"]:
        yield "  stale      over --max-staleness: its step has taken it out of the loss"
    yield f"  engine     {told['engine'] or 'unknown'}"
    scored = "unscored" if told["reward"] is None else f"reward {told['reward']:g}"
    yield f"  response   {scored}, finish {told['finish']}"
    yield f"  group      {state_text({'state': told['group_state'], **told})}"
