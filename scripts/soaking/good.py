"""Good clients: what they ask, and what they count as an answer."""

import random
from dataclasses import dataclass

from soaking.exchange import Answer, Json

USAGE = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "ignore_eos": True}


@dataclass(frozen=True)
class Job:
    """A good request; two of one name must get the same answer."""

    name: str
    path: str
    body: Json

    def tokens(self, answer: Answer) -> tuple[int, ...]:
        """The answer's token ids.

        Raises:
            ValueError: it is not a complete answer of exactly `max_tokens`.
        """
        if answer.status != 200:
            raise ValueError(answer.error or f"status {answer.status}: {answer.body[:200].decode(errors='replace')}")
        events = answer.events()
        choices = [event["choices"][0] for event in events if event.get("choices")]
        ids = tuple(token for choice in choices for token in choice.get("token_ids") or ())
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        counted = events[-1]["usage"]["completion_tokens"]
        if not len(ids) == counted == self.body["max_tokens"] or reasons != ["length"]:
            raise ValueError(f"{len(ids)} ids, usage {counted}, wanted {self.body['max_tokens']}, ended by {reasons}")
        return ids


def good_jobs(seed: int) -> list[Job]:
    """Texts, token ids and conversations, short and of several pages, some with a common beginning."""
    rng, jobs = random.Random(seed), []
    common = [rng.randrange(256) for _ in range(96)]
    for i in range(24):
        options = {"max_tokens": rng.randrange(8, 40), "temperature": i % 2, "seed": i, **USAGE}
        if i % 6 == 5:  # few: the format of the conversation alone is some 350 bytes, each a token of a tiny model
            messages = [{"role": "user", "content": f"Question {i}: " + "why? " * rng.randrange(1, 12)}]
            jobs.append(Job(f"chat-{i}", "/v1/chat/completions", {"messages": messages, **options}))
        elif i % 2 == 0:
            prompt = common[: rng.randrange(1, 97)] + [rng.randrange(256) for _ in range(rng.randrange(1, 80))]
            jobs.append(Job(f"ids-{i}", "/v1/completions", {"prompt": prompt, **options}))
        else:
            text = "".join(rng.choice("abcdefg é\u4e2d\n") for _ in range(rng.randrange(1, 150)))
            jobs.append(Job(f"text-{i}", "/v1/completions", {"prompt": text, **options}))
    return jobs
