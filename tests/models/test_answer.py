"""Answers: the parse, its independence from how the text is cut, broken markup, and the way back into a prompt."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.models.answer import (
    Answer,
    AnswerParser,
    ArgumentsDelta,
    CallDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    parse,
)
from anabranch.models.chat import ChatRenderer
from anabranch.models.tokenizer import Tokenizer, byte_level_tokenizer

K3, KL = "kimi_k3", "kimi_linear"
O, C, S = "<|open|>", "<|close|>", "<|sep|>"  # noqa: E741
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGS, DONE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
THOUGHT, ANSWER, LEAVE = f"{C}think{S}{O}response{S}", f"{C}response{S}", f"{C}message{S}"
TOOLS, F = f"{THOUGHT}{O}tools{S}", f'{O}call tool="f"{S}'


def argument(key: str, kind: str, value: str) -> str:
    return f'{O}argument key="{key}" type="{kind}"{S}{value}{C}argument{S}'


def k3_call(name: str, index: int, *arguments: str) -> str:
    return f'{O}call tool="{name}" index="{index}"{S}{"".join(arguments)}{C}call{S}'


def k3_tools(*calls: str) -> str:
    return f"{O}tools{S}{''.join(calls)}{C}tools{S}"


def kl_call(call_id: str, arguments: str) -> str:
    return f"{CALL}{call_id}{ARGS}{arguments}{DONE}"


CITY = argument("city", "string", 'São "Paulo"\n')
FIRST = k3_call("get_weather", 1, CITY, argument("days", "number", "3"), argument("o", "object", '{"a": [null]}'))
K3_TEXT = f" Why < not?\n{THOUGHT}So <b> it is.{ANSWER}{k3_tools(FIRST, k3_call('now', 2))}{LEAVE}"
FIVE = argument("five", "number", "5")
RAW = f'{O}json type="object"{S}{{oops{C}json{S}'
KL_CALLS = kl_call("functions.f:0", '{"x": "<|"}') + kl_call("functions.a.g:1", "{}")
KL_TEXT = f"Let me <see>.\n{BEGIN}{KL_CALLS}{END}"
WHOLE = [(K3, K3_TEXT), (KL, KL_TEXT)]


def read(pieces: Iterable[str], architecture: str, thinking: bool = True, tools: bool = True) -> list[Delta]:
    numbers = itertools.count()
    parser = AnswerParser(architecture, thinking=thinking, tools=tools, new_id=lambda: f"c{next(numbers)}")
    return [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()


def answer(text: str, architecture: str = K3, thinking: bool = True, tools: bool = True) -> Answer:
    return Answer.of(read([text], architecture, thinking, tools))


def brief(text: str, architecture: str = K3, **options: bool) -> tuple[Any, ...]:
    """(reasoning, content, *calls as name(arguments))."""
    parsed = answer(text, architecture, **options)
    return parsed.reasoning, parsed.content, *(f"{call.name}({call.arguments})" for call in parsed.tool_calls)


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """The deltas with neighbours of one kind joined."""
    result: list[Any] = []
    for delta in deltas:
        last = result[-1] if result else None
        if last is None or isinstance(delta, CallDelta) or type(delta) is not type(last):
            result.append(delta)
        elif isinstance(delta, ContentDelta):
            assert not delta.moved or last.moved
            result[-1] = ContentDelta(last.text + delta.text, last.moved)
        elif isinstance(delta, ArgumentsDelta):
            assert delta.index == last.index
            result[-1] = ArgumentsDelta(last.index, last.text + delta.text)
        else:
            result[-1] = ReasoningDelta(last.text + delta.text)
    return result


# whole answers


def test_k3_deltas() -> None:
    assert read([K3_TEXT], K3) == [
        ReasoningDelta(" Why < not?\n"),
        ContentDelta("So <b> it is."),
        CallDelta(0, "c0", "get_weather"),
        ArgumentsDelta(0, '{"city": "São \\"Paulo\\"\\n", "days": 3, "o": {"a": [null]}}'),
        CallDelta(1, "c1", "now"),
        ArgumentsDelta(1, "{}"),
    ]
    assert brief("Hi \n" + ANSWER + LEAVE, thinking=False) == (None, "Hi \n")


def test_kl_deltas() -> None:
    assert read([KL_TEXT], KL) == [
        ContentDelta("Let me <see>.\n"),
        CallDelta(0, "functions.f:0", "f"),
        ArgumentsDelta(0, '{"x": "<|"}'),
        CallDelta(1, "functions.a.g:1", "a.g"),
        ArgumentsDelta(1, "{}"),
    ]
    assert brief(" plain\n", KL) == (None, " plain\n")


def test_arguments_stream_as_they_come() -> None:
    parser = AnswerParser(K3, thinking=False, tools=True)
    head = f'{O}tools{S}{O}call tool="a&amp;&quot;b" index="1"{S}{O}argument key="k&quot;" type="string"{S}'
    start, opening = parser.push(head + "on")
    assert isinstance(start, CallDelta)
    assert start.name == 'a&"b'
    assert opening == ArgumentsDelta(0, '{"k\\"": "on')
    assert parser.push("e\n") == [ArgumentsDelta(0, "e\\n")]
    assert parser.push(f"{C}argument") == []
    assert parser.push(S) == [ArgumentsDelta(0, '"')]
    assert parser.finish() == []
    parser = AnswerParser(KL, thinking=False, tools=True)
    assert parser.push(f"{CALL}f:0{ARGS}1") == [CallDelta(0, "f:0", "f"), ArgumentsDelta(0, "1")]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("string", "5", '"5"'),
        ("string", '\\ "\t', '"\\\\ \\"\\t"'),
        ("string", "", '""'),
        ("number", "-1.50e3", "-1.50e3"),
        ("boolean", "true", "true"),
        ("null", "null", "null"),
        ("array", ' [1, "é"] ', ' [1, "é"] '),
        ("integer", "7", "7"),
        # not JSON: kept as a string
        ("number", "about 5", '"about 5"'),
        ("boolean", "True", '"True"'),
        ("number", "NaN", '"NaN"'),
        ("number", "", '""'),
        ("object", '{"a": 1', '"{\\"a\\": 1"'),
        ("array", "[" * 100_000, json.dumps("[" * 100_000)),
        ("number", "9" * 5000, json.dumps("9" * 5000)),
    ],
)
def test_k3_argument_types(kind: str, value: str, expected: str) -> None:
    text = k3_tools(k3_call("f", 1, argument("k", kind, value)))
    assert brief(text, thinking=False) == (None, "", f'f({{"k": {expected}}})')


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.get_weather:0", "get_weather"),
        (" functions.f:12 ", "f"),
        ("f:0", "f"),
        ("functions.mcp.server.f:3", "mcp.server.f"),
        ("functions_get_2_1", "get_2"),
        ("functions.a:b:0", "a:b"),
        ("md5", "md5"),
        ("functions.md5", "md5"),
        ("call_abc_1", "call_abc_1"),
    ],
)
def test_kl_names_come_from_ids(call_id: str, name: str) -> None:
    (call,) = answer(BEGIN + kl_call(call_id, "{}") + END, KL).tool_calls
    assert (call.id, call.name) == (call_id.strip(), name)


# any cut of the text


@pytest.mark.parametrize(("architecture", "text"), WHOLE)
def test_every_cut_gives_the_same_and_shows_no_marker(architecture: str, text: str) -> None:
    expected = read([text], architecture)
    shown = '{"x": "<|"}' if architecture == KL else ""
    for cut in range(len(text) + 1):
        assert joined(read([text[:cut], text[cut:]], architecture)) == expected
    for size in (1, 2, 3, 7):
        deltas = read([text[at : at + size] for at in range(0, len(text), size)], architecture)
        assert joined(deltas) == expected
        assert "<|" not in "".join(getattr(delta, "text", "") for delta in deltas).replace(shown, "")


FRAGMENTS = [O, C, S, "<|end_of_msg|>", "<|im_end|>", BEGIN, END, CALL, ARGS, DONE, "<|tool_call_section_begin|>"]
FRAGMENTS += [f"{mark}{name}{S}" for mark in (O, C) for name in ("think", "response", "tools", "message", "call", "")]
FRAGMENTS += [f"{C}argument{S}", f"{C}json{S}", f'{O}json type="object"{S}', f"{C}think", f"{C} message {S}", "think"]
FRAGMENTS += [F, f'{O}argument key="k" type="string"{S}', f'{O}argument key="n" type="n"{S}']
FRAGMENTS += ["<", "<|", "<|clo", "se|>", "|>", " ", "\n", '"', 'call tool="', '" index="', '="', "[1", "]", "5", "{}"]
FRAGMENTS += ["functions.f:0", "functions_f_1", ":0", "a", "é", "b c", "\\", "functions.", "respons", "message x"]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)


@given(texts, st.sampled_from([K3, KL]), st.booleans(), st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
def test_any_text_cut_anywhere(text: str, architecture: str, thinking: bool, tools: bool, data: st.DataObject) -> None:
    expected = read([text], architecture, thinking, tools)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert joined(read(pieces, architecture, thinking, tools)) == joined(expected)
    assert joined(read(text, architecture, thinking, tools)) == joined(expected)


@given(st.lists(st.sampled_from([f for f in FRAGMENTS if '="' not in f or f.endswith(S)]), max_size=20), st.booleans())
@example([C, "think<", O], True)
@settings(max_examples=300, deadline=None)
def test_no_word_is_lost(fragments: list[str], thinking: bool) -> None:
    # a numbered word after every fragment
    text = "".join(f"{fragment}q{number}q" for number, fragment in enumerate(fragments))
    for architecture, tools in itertools.product((K3, KL), (True, False)):
        parsed = answer(text, architecture, thinking, tools)
        shown = [parsed.reasoning or "", parsed.content, *(c.id + c.name + c.arguments for c in parsed.tool_calls)]
        # an id that the end cut off is no text
        unfinished = rf"{re.escape(CALL)}(?:(?!<\|tool_call|<\|im_end).)*$" if architecture == KL and tools else "(?!)"
        words = re.findall(r"q\d+q", re.sub(unfinished, "", text, flags=re.DOTALL))
        assert [word for word in words if word not in "".join(shown)] == []


@given(texts, st.booleans())
@settings(max_examples=200, deadline=None)
def test_closed_k3_calls_have_json_arguments(text: str, thinking: bool) -> None:
    plain = re.sub(r'<\|open\|>json type="object"<\|sep\|>', "", text)
    for call in answer(plain + C + "argument" + S + LEAVE + "<|end_of_msg|>", K3, thinking).tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


def test_only_possible_markers_are_held_back() -> None:
    for architecture in (K3, KL):
        parser = AnswerParser(architecture, thinking=False, tools=True)
        assert parser.push("a < b") == [ContentDelta("a < b")]
        assert parser.push("a <") == [ContentDelta("a ")]
        assert parser.push("| ") == [ContentDelta("<| ")]
        assert parser.push("<|") == []
        assert parser.finish() == [ContentDelta("<|")]
    parser = AnswerParser(K3, thinking=False, tools=True)
    for held, shown in (
        (f"{O}respo", " "),
        (f"{O}respo", "x"),
        (f"{C}message", "x"),
        (f"{O}call", ""),
        (O + "tools ", "?"),
    ):
        assert "".join(d.text for d in parser.push(held) if isinstance(d, ContentDelta)) == ("" if shown else held)
        assert parser.push(shown) == ([ContentDelta(held + shown)] if shown else [])
    long = f'{O}tools a="' + "x" * 1100
    assert parser.push(long) == [ContentDelta(long)]
    parser = AnswerParser(KL, thinking=False, tools=True)
    assert parser.push(CALL + "x" * 1000) == []
    assert parser.push("x" * 100) == [ContentDelta(CALL + "x" * 1100)]


@pytest.mark.parametrize(("architecture", "text"), WHOLE)
def test_cut_off_answers_are_beginnings_of_the_whole(architecture: str, text: str) -> None:
    whole = answer(text, architecture)
    # the end never falls inside of a marker, which is one token
    inside = {at for found in re.finditer(r"<\|\w+\|>", text) for at in range(found.start() + 1, found.end())}
    for cut in set(range(len(text))) - inside:
        part = answer(text[:cut], architecture)
        assert (whole.reasoning or "").startswith(part.reasoning or "")
        assert whole.content.startswith(part.content)
        for call, full in itertools.zip_longest(part.tool_calls, whole.tool_calls[: len(part.tool_calls)]):
            assert (call.id, call.name) == (full.id, full.name)
            assert full.arguments.startswith(call.arguments)
    text = f'{TOOLS}{F}{O}argument key="a" type="array"{S}[1, '
    assert brief(text) == (None, "", 'f({"a": [1, )')


# what models get wrong


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the think channel left without closing it, or with half of the closing tag
        (f"why{O}response{S}yes{ANSWER}{LEAVE}", ("why", "yes")),
        (f"why{k3_tools(k3_call('f', 1))}{LEAVE}", ("why", "", "f({})")),
        (f"why{C}think{O}response{S}yes{C}response{C}message{S}", ("why", "yes")),
        (f"why{C}think{O}tools{S}{k3_call('f', 1)}", ("why", "", "f({})")),
        (f"why{C} think {S}{O} response{S}yes", ("why", "yes")),
        (f"why{C}think{S}\n\n yes.\n{LEAVE}", ("why", "\n\n yes.")),
        (f"why{C}{S}{O}response{S}yes{C}{S}", ("why", "yes")),
        # its opening repeated, in either mode
        (f"{O}think{S}why{THOUGHT}yes", ("why", "yes")),
        # the reply written inside of it
        (f"yes{ANSWER}{LEAVE}", (None, "yes")),
        (f"yes{ANSWER}{k3_tools(k3_call('f', 1))}", (None, "yes", "f({})")),
        (f"why{THOUGHT}{O}think{S}yes{ANSWER}", ("why", "yes")),
        (f"why{LEAVE}", ("why", "")),
        # the message ended without closing the response or the tools
        (f"why{THOUGHT}yes{LEAVE}<|end_of_msg|>", ("why", "yes")),
        (f"why{THOUGHT}yes<|end_of_msg|>more", ("why", "yesmore")),
        (f"{THOUGHT}yes{O}tools{S}{k3_call('f', 1)}{LEAVE}", (None, "yes", "f({})")),
        (f'{TOOLS}{F}{O}argument key="a"{S}v{LEAVE}', (None, "", 'f({"a": "v"})')),
        # ends of arguments and calls left out
        (
            f'{TOOLS}{F}{O}argument key="a" type="number"{S}1{O}argument key="b"{S}2{C}call{S}{F}{C}tools{S}',
            (None, "", 'f({"a": 1, "b": "2"})', "f({})"),
        ),
        (f'{TOOLS}{F}{O}call tool="g"{S}{C}call{S}', (None, "", "f({})", "g({})")),
        # text and white space between elements
        (f"{THOUGHT}a{ANSWER}\n{O}tools{S} \n{F}{C}{S} b\n{F}{C}{S}\n", (None, "a b", "f({})", "f({})")),
        # whole arguments at once, as chat_k3 writes them when they were no JSON
        (THOUGHT + k3_tools(k3_call("f", 1, RAW)), (None, "", "f({oops)")),
        (THOUGHT + k3_tools(k3_call("f", 1, RAW, "a")), (None, "a", "f({oops)")),
        (THOUGHT + k3_tools(k3_call("f", 1, RAW, FIVE)), (None, FIVE.removesuffix(f"{C}argument{S}"), "f({oops)")),
        # no type, no key, escapes
        (f'{TOOLS}{F}{O}argument key="&amp;quot;"{S}5{C}{S}{C}{S}', (None, "", 'f({"&quot;": "5"})')),
        (f"{TOOLS}{F}{O}argument{S}5{C}{S}", (None, f"{O}argument{S}5", "f({})")),
        # no markup: text of the place it stands in
        (f"{THOUGHT}a{O}tools{C}b{C}{C}response{S}", (None, f"a{O}tools{C}b{C}")),
        (f"a{O}b{S}c{THOUGHT}d{O}x{S}{C}y{S}e{S}", (f"a{O}b{S}c", f"d{O}x{S}{C}y{S}e{S}")),
        (f"{THOUGHT}{F}x", (None, f"{F}x")),
        (f'{TOOLS}{O}argument key="a"{S}x', (None, f'{O}argument key="a"{S}x')),
        (f'{TOOLS}{O}call index="1"{S}x', (None, f'{O}call index="1"{S}x')),
        (
            f'{TOOLS}{F}{O}argument key="a"{S}{O}tools{S}{C}response{S}{O}p{S}{C}{S}{C}{S}',
            (None, "", f'f({{"a": "{O}tools{S}{C}response{S}{O}p{S}"}})'),
        ),
        # a tag cut off by the end is no text
        (f"why{THOUGHT}yes{C}respon", ("why", "yes")),
        (f'why{THOUGHT}yes{ANSWER}{O}tools{S}{O}call tool="get', ("why", "yes")),
    ],
)
def test_k3_slips(text: str, expected: tuple[Any, ...]) -> None:
    assert brief(text) == expected


def test_k3_without_thinking_takes_a_think_channel_all_the_same() -> None:
    assert brief(f"{C}think{S}{k3_tools(k3_call('f', 1))}", thinking=False) == (None, "", "f({})")
    assert brief(f"{O}think{S}why{THOUGHT}yes", thinking=False) == ("why", "yes")
    assert brief(f"yes{ANSWER}{LEAVE}", thinking=False) == (None, "yes")


def test_a_reply_inside_think_is_marked_as_moved() -> None:
    assert read(["a", "b", ANSWER], K3) == [ReasoningDelta("a"), ReasoningDelta("b"), ContentDelta("ab", moved=True)]
    assert read([" ", ANSWER], K3) == [ReasoningDelta(" ")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # no section, the other spelling of it, no end of it
        (f"a{kl_call('functions.f:0', '{}')}", (None, "a", "f({})")),
        (f"a<|tool_call_section_begin|>{kl_call('f:0', '{}')}<|tool_call_section_end|>", (None, "a", "f({})")),
        (f"a{BEGIN}\n{kl_call('f:0', '{}')}\n{kl_call('g:1', '{}')}\nb", (None, "a\nb", "f({})", "g({})")),
        # an end that the next marker implies
        (f"{BEGIN}{CALL}f:0{ARGS}1{CALL}g:1{ARGS}2{END}b", (None, "b", "f(1)", "g(2)")),
        (f"{BEGIN}{CALL}f:0{ARGS}1<|im_end|>b", (None, "b", "f(1)")),
        # no arguments
        (f"{BEGIN}{CALL}f:0{DONE}a{CALL}g:1{ARGS} {DONE}{END}", (None, "a", "f({})", "g( {})")),
        # no markup: content
        (f"a{DONE}b{END}c{ARGS}d", (None, f"a{DONE}b{END}c{ARGS}d")),
        (f"{BEGIN}{CALL} {ARGS}x{DONE}{END}", (None, f"{CALL} {ARGS}x{DONE}")),
        (f"{BEGIN}{CALL}functions.{ARGS}x{DONE}{END}", (None, f"{CALL}functions.{ARGS}x{DONE}")),
        (f"{BEGIN}{CALL}words{DONE}{CALL}f:0{ARGS}1", (None, f"{CALL}words{DONE}", "f(1)")),
        (f"{CALL}x{CALL}f:0{ARGS}a{ARGS}b{BEGIN}c{DONE}", (None, f"{CALL}x", f"f(a{ARGS}b{BEGIN}c)")),
        # the end of the message is never shown; an id cut off by the end is no text
        ("a<|im_end|>\n", (None, "a\n")),
        (f"{BEGIN}{kl_call('f:0', '1')}<|im_end|>\n", (None, "", "f(1)")),
        (f"a{BEGIN}{CALL}functions.get_wea", (None, "a")),
    ],
)
def test_kl_slips(text: str, expected: tuple[Any, ...]) -> None:
    assert brief(text, KL) == expected


def test_without_tools_calls_are_content() -> None:
    calls = k3_tools(FIRST)
    assert brief(f"why{THOUGHT}yes{ANSWER}{calls}{LEAVE}", tools=False) == ("why", "yes" + calls)
    assert brief(KL_TEXT + "<|im_end|>", KL, tools=False) == (None, KL_TEXT)


# back into a prompt

KL_NAMES = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
SPECIALS = {
    KL: [(name, True) for name in (*KL_NAMES, BEGIN, END, CALL, ARGS, DONE)],
    K3: [("<|end_of_msg|>", True), (O, False), (C, False), (S, False)],
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ChatRenderer, Tokenizer]]:
    made = {}
    for architecture, names in SPECIALS.items():
        tokenizer = Tokenizer(byte_level_tokenizer(names))
        made[architecture] = (
            ChatRenderer.load(tmp_path_factory.mktemp(architecture), tokenizer, architecture),
            tokenizer,
        )
    return made


def completion(chat: tuple[ChatRenderer, Tokenizer], message: dict[str, Any], **options: Any) -> list[int]:
    """Ids that the message adds to a prompt: what the model would have to write to have said it."""
    user = {"role": "user", "content": "?"}
    prompt = chat[0].render([user], **options)
    ids = chat[0].render([user, message], add_generation_prompt=False, **options)
    assert ids[: len(prompt)] == prompt
    return ids[len(prompt) :]


@pytest.mark.parametrize(("architecture", "text"), WHOLE)
def test_round_trip_of_text(chats: Any, architecture: str, text: str) -> None:
    ids = completion(chats[architecture], parse(text, architecture, thinking=True, tools=True).message())
    end = "<|end_of_msg|>" if architecture == K3 else "<|im_end|>"
    assert chats[architecture][1].decode(ids, skip_special=False) == text + end


# without markers, which no parser of text can tell from the format's own
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda word: "<|" not in word)
visible_words = words.filter(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
names = st.from_regex(r"[a-z][a-z_.]{0,5}", fullmatch=True)
call_lists = st.lists(st.tuples(names, st.dictionaries(words, values, max_size=3)), max_size=3)


@given(words, visible_words | st.none(), call_lists)
@settings(max_examples=100, deadline=None)
def test_round_trip_of_messages(
    chats: Any, content: str, reasoning: str | None, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    made = [
        {"id": f"functions.{name}:{index}", "type": "function", "function": {"name": name, "arguments": given}}
        for index, (name, given) in enumerate(calls)
    ]
    for call in made:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    for architecture, skip in ((K3, True), (KL, False)):
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if made else "")}
        message |= {"tool_calls": made} if made else {}
        message |= {"reasoning_content": reasoning} if reasoning and architecture == K3 else {}
        ids = completion(chats[architecture], message)
        text = chats[architecture][1].decode(ids, skip_special=skip)
        ids_of_calls = iter([call["id"] for call in made])
        parser = AnswerParser(architecture, thinking=True, tools=True, new_id=lambda: next(ids_of_calls))  # noqa: B023
        assert Answer.of([*parser.push(text), *parser.finish()]).message() == message


def test_tool_results_find_their_k3_calls(chats: Any) -> None:
    calls = k3_tools(k3_call("f", 1), k3_call("g", 2))
    first, second = (parse(calls, K3, thinking=False, tools=True).message() for _ in range(2))
    ids = [call["id"] for message in (first, second) for call in message["tool_calls"]]
    assert len(set(ids)) == 4
    results = [{"role": "tool", "tool_call_id": call_id, "content": call_id} for call_id in ids]
    messages = [first, *reversed(results[:2]), second, *reversed(results[2:])]
    text = chats[K3][1].decode(chats[K3][0].render(messages, thinking=False))
    found = re.findall(r'role="tool" tool="(\w)" index="(\d)"<\|sep\|>(\w+)', text)
    assert found == [("f", "1", ids[0]), ("g", "2", ids[1]), ("f", "1", ids[2]), ("g", "2", ids[3])]


def test_messages() -> None:
    assert answer("x", KL).message() == {"role": "assistant", "content": "x"}
    assert answer("", KL).message() == {"role": "assistant", "content": ""}
    assert answer(f"y{THOUGHT}{k3_tools(k3_call('f', 1))}").message() == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "y",
        "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


def test_a_cut_off_call_can_be_rendered(chats: Any) -> None:
    for architecture, text in WHOLE:
        for cut in range(len(text)):
            message = parse(text[:cut], architecture, thinking=True, tools=True).message()
            chats[architecture][0].render([{"role": "user", "content": "?"}, message])


@pytest.mark.parametrize(("architecture", "skip"), [(K3, True), (KL, False)])
def test_which_special_tokens_the_parser_needs(chats: Any, architecture: str, skip: bool) -> None:
    text = dict(WHOLE)[architecture]
    tokenizer = chats[architecture][1]
    ids = tokenizer.encode(text, allow_special=True)
    for stream in (tokenizer.stream(skip_special=skip), tokenizer.stream(skip_special=not skip)):
        pieces = [stream.push(token_id) for token_id in ids] + [stream.flush()]
        right = joined(read(pieces, architecture)) == read([text], architecture)
        assert right == (architecture == K3 or stream._skip_special == skip)
    assert "<|" in tokenizer.decode(ids, skip_special=skip)


def test_unknown_architecture() -> None:
    with pytest.raises(ValueError, match="unknown architecture 'llama'; accepted: kimi_linear, kimi_k3"):
        AnswerParser("llama", thinking=False, tools=False)
