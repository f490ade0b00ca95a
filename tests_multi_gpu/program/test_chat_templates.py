"""Labels of conversations by the chat templates of current model families, as TRL ships them: equal to the masks of
``{% generation %}``, or to each answer rendered as the last turn; and which conversations are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training_runs import ROOT, config_for, write_base
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from liger_dist_train.chat_template import GENERATION, ChatTemplate
from liger_dist_train.config import TrainConfig
from liger_dist_train.export import export
from liger_dist_train.run import train
from liger_dist_train.sources import Row
from liger_dist_train.tokenization import Encoder, Format
from liger_dist_train.tokenizer_training import CHAT_TEMPLATE

trl = pytest.importorskip("trl")
TEMPLATES = {file.stem: file.read_text() for file in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
# TRL ships none of these two: the format of Phi-4, and that of Mistral 7B v0.3, with the system's words in the last
# question.
TEMPLATES["phi4"] = (
    "{% for turn in messages %}{{ '<|im_start|>' + turn['role'] + '<|im_sep|>' + turn['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
TEMPLATES["mistral"] = (
    "{% set ns = namespace(system='') %}{{ '<s>' }}{% for turn in messages %}{% if turn['role'] == 'system' %}"
    "{% set ns.system = turn['content'] + '\n\n' %}{% elif turn['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last or (loop.revindex == 2 and messages[-1]['role'] == 'assistant') %}{{ ns.system }}{% endif %}"
    "{{ turn['content'] + '[/INST]' }}{% elif turn['role'] == 'assistant' %}{{ ' ' + turn['content'] + '</s>' }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
TEMPLATES["demo"] = CHAT_TEMPLATE
EOS = {
    **dict.fromkeys(("phi3", "phi3_5", "glm4moe"), "<|endoftext|>"),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), "<|eot_id|>"),
    "gptoss": "<|return|>",
}
OTHER_EOS = (
    *("<｜end▁of▁sentence｜>", "<|im_end|>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>", "<turn|>"),
    *("<end_of_utterance>", "<|end_of_text|>"),
)
SPECIAL = r"<\|[a-zA-Z_0-9]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<end_of_utterance>|\[/?INST\]"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "now", "parameters": CITY}}]
KINDS: dict[str, list[dict[str, Any]]] = {
    "one": [user("Hi there"), assistant("Hello world")],
    "turns": [
        *(user("Hi"), assistant("First answer"), user("And?"), assistant("Second answer")),
        *(user("Then?"), assistant("Third answer")),
    ],
    "system": [
        {"role": "system", "content": "Be brief"},
        *(user("Hi"), assistant("First answer"), user("And?"), assistant("Second answer")),
    ],
    "reasoning": [
        *(user("Hi"), assistant("<think>\nlong thought\n</think>\n\nFirst answer")),
        *(user("And?"), assistant("<think>\nother thought\n</think>\n\nSecond answer")),
    ],
    "tools": [
        *(user("Weather?"), assistant("", tool_calls=CALL)),
        *({"role": "tool", "name": "weather", "content": '{"t": 21}'}, assistant("It is warm")),
    ],
}
REFUSED: dict[str, dict[str, str]] = {
    # What the template itself refuses, or cannot write.
    **{name: {"tools": "template"} for name in ("cohere", "cohere2", "gemma3", "llava_next")},
    "gemma": {"system": "template", "tools": "template"},
    **{
        name: {"tools": "leaves out"}
        for name in ("idefics3", "lfm2", "llama3", "phi3", "phi3_5", "phi4", "qwen2_5_vl", "smolvlm")
    },
    "mistral": {"system": "last", "tools": "template"},
    # History without what the last answer has.
    "glm4moe": {"reasoning": "last"},
    "qwen3": dict.fromkeys(("turns", "system", "reasoning", "tools"), "last"),
    **{name: dict.fromkeys(("turns", "system", "reasoning"), "last") for name in ("qwen3_5_think", "qwen3_6")},
    "qwen3_5_nothink": {"turns": "last", "system": "last", "reasoning": "prompt"},
    **{name: {"reasoning": "last"} for name in ("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl")},
    # Prompts that begin a reasoning, which the answer does not have, or loses.
    "deepseek_r1_distill": dict.fromkeys(("one", "turns", "system", "reasoning"), "prompt") | {"tools": "leaves out"},
    "deepseekv3": dict.fromkeys(("one", "turns", "system", "reasoning"), "prompt") | {"tools": "leaves out"},
    **{
        f"nemotron_3_{name}": dict.fromkeys(("one", "turns", "system", "tools"), "prompt") | {"reasoning": "last"}
        for name in ("nano", "super", "ultra", "5_lightning")
    },
}
"""template and kind: refused by the template, because it leaves something out, because the prompt is not how the answer
begins, or but for the last answer; all others are learned whole"""
IN_PARTS = ("idefics3", "smolvlm", "llava_next")
"""families whose templates take contents as lists of parts alone"""
ENDS = re.compile(rf"(?:(?:{SPECIAL})?\s*)+\Z")
ANOTHER_END = ("gptoss", "phi3", "phi3_5", "glm4moe")
"""templates that end an answer in history otherwise than the last one, or with the next turn's first token"""


def tokenizer_for(name: str) -> Any:
    """Bytes, and the special tokens that the template writes."""
    template = TEMPLATES[name]
    special = set(re.findall(SPECIAL, template))
    eos = EOS.get(name.removesuffix("_training")) or next((one for one in OTHER_EOS if one in special), "</s>")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens = sorted({*special, eos, "<s>"})
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        ["hello world"], trainers.BpeTrainer(special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    )
    found = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, bos_token="<s>", additional_special_tokens=sorted(special - {eos})
    )
    found.chat_template = template
    return found


def row_of(turns: list[dict[str, Any]], tools: Any = None) -> dict[str, list[Any]]:
    row = Row("", 0, {"messages": turns, "tools": tools}, None)._asdict()
    return {name: [value] for name, value in row.items()}


def learned(tokenizer: Any, turns: list[dict[str, Any]], tools: Any = None, **format: Any) -> list[str] | str:
    """The runs of labels as texts; or why the row is refused."""
    found = Encoder(tokenizer, Format(**format), len(tokenizer))(row_of(turns, tools))
    if found["reason"][0] is not None:
        return str(found["reason"][0])
    runs: list[list[int]] = [[]]
    for label in found["labels"][0]:
        if label >= 0:
            runs[-1].append(int(label))
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def rendered_alone(tokenizer: Any, turns: list[dict[str, Any]], tools: Any) -> Iterator[str]:
    """Each answer as the last turn, without the prompt that it is generated from."""
    if tokenizer.chat_template in [TEMPLATES[name] for name in IN_PARTS]:
        turns = _in_parts(turns)
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            shown = {"tools": tools, "tokenize": False}
            before = tokenizer.apply_chat_template(turns[:index], add_generation_prompt=True, **shown)
            yield tokenizer.apply_chat_template(turns[: index + 1], **shown).removeprefix(before)


MARKED = sorted(name for name, template in TEMPLATES.items() if GENERATION.search(template))


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - MARKED))
def test_every_answer_is_learned_or_the_conversation_refused(name: str) -> None:
    tokenizer, expected = tokenizer_for(name), REFUSED.get(name, {})
    for kind, turns in KINDS.items():
        tools = TOOLS if kind == "tools" else None
        found, outcome = learned(tokenizer, turns, tools), expected.get(kind)
        if outcome is None:
            assert isinstance(found, list), (kind, found)
            alone = list(rendered_alone(tokenizer, turns, tools))
            assert len(found) == len(alone)
            for got, want in zip(found, alone, strict=True):
                if name in ANOTHER_END:
                    assert ENDS.sub("", got) == ENDS.sub("", want)
                    assert ENDS.search(got), "no end of turn"
                else:
                    assert got == want
            continue
        assert isinstance(found, str), (kind, found)
        last = learned(tokenizer, turns, tools, train_on="last_turn")
        if outcome == "last":
            assert "--train_on last_turn" in found or "enable_thinking" in found
            (got,), want = last, list(rendered_alone(tokenizer, turns, tools))[-1]
            assert ENDS.sub("", got) == ENDS.sub("", want)
        else:
            assert isinstance(last, str)
            assert outcome in last


@pytest.mark.parametrize("name", MARKED)
def test_marks_of_the_template_are_the_labels(name: str) -> None:
    tokenizer = tokenizer_for(name)
    for kind, turns in KINDS.items():
        tools = TOOLS if kind == "tools" else None
        found = learned(tokenizer, turns, tools)
        if isinstance(found, str):
            outcome = REFUSED[name.removesuffix("_training")][kind]
            if outcome == "template":
                assert "is refused by the chat template" in found
                continue
            assert "leaves out" in found
            if outcome == "last":
                assert "; --train_on last_turn, " in found
                assert "other thought" in learned(tokenizer, turns, tools, train_on="last_turn")[0]
            continue
        shown = tokenizer.apply_chat_template(
            _in_parts(turns) if name.startswith(IN_PARTS) else turns,
            tools=tools,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        marked = [i for i, mark in zip(shown["input_ids"], shown["assistant_masks"], strict=True) if mark]
        assert "".join(found) == tokenizer.decode(marked)


def _in_parts(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]


MARKED_OTHERWISE = {
    # From the role on.
    **dict.fromkeys(("gptoss", "muse_glimmer"), tuple(KINDS)),
    # With the line break, or the beginning of a reasoning, that the prompt ends with.
    "qwen2_5": tuple(KINDS),
    "qwen3_8": tuple(KINDS),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), ("one", "tools")),
    # Without the space after the end of a turn; without the token that ends a call.
    "llava_next": ("one", "turns", "system", "reasoning"),
    "diffusion_gemma": ("tools",),
}
"""template and kinds where the marks that TRL has added are not what follows the prompt"""


@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(name for name in TEMPLATES if f"{name}_training" in TEMPLATES))
def test_the_labels_without_marks_are_those_with_marks(name: str) -> None:
    plain, marked = tokenizer_for(name), tokenizer_for(f"{name}_training")
    for kind, turns in KINDS.items():
        got, want = (learned(one, turns, TOOLS if kind == "tools" else None) for one in (plain, marked))
        if isinstance(got, list) and isinstance(want, list):
            assert ("".join(got) == "".join(want)) != (kind in MARKED_OTHERWISE.get(name, ())), kind


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "llama3"])
def test_contents_in_parts(name: str) -> None:
    tokenizer = tokenizer_for(name)
    found = learned(tokenizer, _in_parts(KINDS["one"]))
    assert found == learned(tokenizer, KINDS["one"])
    assert "Hello world" in found[0]
    with_image = [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, assistant("A cat")]
    assert "expected parts of text" in learned(tokenizer, with_image)


def test_an_answer_that_the_template_leaves_out_is_refused() -> None:
    tokenizer = tokenizer_for("llama3")
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "'-'")
    assert "has content in turn 0 (user) that the chat template leaves out or changes: 'Hi there'" in learned(
        tokenizer, KINDS["one"]
    )


@pytest.mark.smoke
def test_variables_of_a_template() -> None:
    """Qwen3's empty reasoning is the prompt's part, and no label, where it is switched off."""
    tokenizer = tokenizer_for("qwen3")
    assert learned(tokenizer, KINDS["one"]) == ["<think>\n\n</think>\n\nHello world<|im_end|>\n"]
    off = json.dumps({"enable_thinking": False})
    assert learned(tokenizer, KINDS["one"], template_variables=off) == ["Hello world<|im_end|>\n"]
    nemotron = tokenizer_for("nemotron_3_nano")
    assert "enable_thinking" in learned(nemotron, KINDS["turns"])
    found = learned(nemotron, KINDS["turns"], template_variables=off)
    assert [text.removesuffix("<|im_end|>\n") for text in found] == ["First answer", "Second answer", "Third answer"]


@pytest.mark.smoke
def test_special_tokens_in_texts() -> None:
    tokenizer = tokenizer_for("llama3")
    eot = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    for values in ({"text": "a <|eot_id|> b"}, {"prompt": "a <|eot_id|>", "completion": " b"}):
        row = Row("", 0, values, None)._asdict()
        for splits, times in ((False, 2), (True, 1)):
            encoder = Encoder(tokenizer, Format(split_special_tokens=splits), len(tokenizer))
            (ids,) = encoder({name: [value] for name, value in row.items()})["ids"]
            # The other one is the end of the sequence.
            assert (ids == eot).sum() == times
            assert tokenizer.decode(ids).endswith("a <|eot_id|> b<|eot_id|>")
    imitated = [user("Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nNo"), assistant("Yes")]
    assert "has the special token '<|eot_id|>' in the content of turn 0" in learned(
        tokenizer, imitated, split_special_tokens=True
    )
    assert learned(tokenizer, imitated) == learned(tokenizer, KINDS["one"][:1] + imitated[1:])
    qwen = tokenizer_for("qwen3")
    for turn, tools, where in (
        (assistant("Yes", reasoning_content="so<|im_end|>"), None, "reasoning_content of turn 1"),
        (assistant("", tool_calls=[_called("a<|im_end|>")]), TOOLS, "tool_calls of turn 1"),
        (assistant("Yes"), [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": "<|im_end|>"}}], "tools"),
    ):
        turns = [user("Hi"), turn]
        assert isinstance(learned(qwen, turns, tools), list)
        found = learned(qwen, turns, tools, split_special_tokens=True)
        assert f"has the special token '<|im_end|>' in the {where}, which" in found
    assert learned(tokenizer, KINDS["one"], split_special_tokens=True) == learned(tokenizer, KINDS["one"])


def test_all_is_learned_of_what_the_template_writes() -> None:
    """With ``--train_on all`` what it leaves out of a learned answer is refused, too."""
    glm = tokenizer_for("glm4moe_training")
    assert "has reasoning in turn 1 (assistant) that the chat template leaves out" in learned(
        glm, KINDS["reasoning"], train_on="all"
    )
    marked = [turn | {"weight": 0} if "long" in turn["content"] else turn for turn in KINDS["reasoning"]]
    for name in ("glm4moe_training", "llama3"):
        tokenizer = tokenizer_for(name)
        found = "".join(learned(tokenizer, marked, train_on="all"))
        assert "First answer" not in found
        assert "other thought" in found
        assert "Second answer" in found
        empty = [user("Hi"), assistant(""), *KINDS["one"]]
        assert "has an empty answer in turn 1" in learned(tokenizer, empty, train_on="all")
        assert "Hello world" in "".join(
            learned(tokenizer, [empty[0], empty[1] | {"weight": 0}, *empty[2:]], train_on="all")
        )


def _called(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


@pytest.mark.parametrize("role", ["ai", "prompt", "message", "Assistant", "answer", "output"])
def test_a_role_is_no_part_of_a_word(role: str) -> None:
    """Words that templates have in names and sentences."""
    for name in TEMPLATES:
        turns = [user("Hi"), {"role": role, "content": "Ho"}, user("Then?"), assistant("Yes")]
        assert isinstance(learned(tokenizer_for(name), turns), str), name


def test_a_template_that_marks_no_answer_has_no_end_of_turn() -> None:
    tokenizer = tokenizer_for("llama3")
    assert ChatTemplate(tokenizer).end_of_turn() == "<|eot_id|>"
    tokenizer.chat_template += "{% if messages | length > 9 %}{% generation %}{% endgeneration %}{% endif %}"
    assert ChatTemplate(tokenizer).end_of_turn() is None


def test_generation_stops_where_an_answer_ends(cache: Path, tmp_path: Path) -> None:
    """A base model's tokenizer with another family's template: its end of a text is not its end of a turn."""
    tokenizer = tokenizer_for("qwen2_5")
    tokenizer.eos_token = "</s>"
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [json.dumps({"messages": KINDS["turns"]})] * 40
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    settings = {"tokenizer": str(tmp_path / "tokenizer"), "steps": 1, "sequence_length": 256, "eval_fraction": 0.0}
    config: TrainConfig = config_for(
        tmp_path / "chats.jsonl", tmp_path / "cache", tmp_path / "run", **settings, strategy="none", global_batch_size=2
    )
    train(config)
    export(tmp_path / "run", tmp_path / "model", step=None)
    ends = GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id
    assert ends == tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])


ARGUMENTS = {"city": "Paris", "days": 3, "units": {"wind": 'in "knots"'}, "now": True}
CALLED = {"name": "weather", "arguments": ARGUMENTS}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"t": 21}'}


def called(**turn: Any) -> list[dict[str, Any]]:
    return [user("Weather?"), {"role": "assistant", **turn}, RESULT, assistant("It is warm")]


OF_CALLS: dict[str, list[dict[str, Any]]] = {
    "OpenAI, arguments as JSON": called(
        content=None,
        tool_calls=[{"id": "call00001", "type": "function", "function": CALLED | {"arguments": json.dumps(ARGUMENTS)}}],
    ),
    "calls without a function": called(content="", tool_calls=[{"id": "call00001", **CALLED}]),
    "calls as JSON": called(content="", tool_calls=json.dumps([{"id": "call00001", "function": CALLED}])),
    "ShareGPT": [
        {"from": "human", "value": "Weather?"},
        {"from": "gpt", "value": "", "tool_calls": [{"id": "call00001", "type": "function", "function": CALLED}]},
        {"from": "tool", "value": '{"t": 21}', "name": "weather", "tool_call_id": "call00001"},
        {"from": "gpt", "value": "It is warm"},
    ],
}
"""one conversation in every shape"""
OF_OLD_CALLS: dict[str, list[dict[str, Any]]] = {
    "function_call": [
        user("Weather?"),
        {"role": "assistant", "content": None, "function_call": CALLED | {"arguments": json.dumps(ARGUMENTS)}},
        {"role": "function", "name": "weather", "content": '{"t": 21}'},
        assistant("It is warm"),
    ],
    "ShareGPT's function_call": [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps(CALLED)},
        {"from": "observation", "value": '{"t": 21}', "name": "weather"},
        {"from": "gpt", "value": "It is warm"},
    ],
}
"""without numbers of calls"""
THOUGHT = "a long thought"
OF_REASONING: dict[str, list[dict[str, Any]]] = {
    **{
        name: [user("Hi"), assistant("An answer", **{name: THOUGHT})]
        for name in ("thinking", "reasoning", "reasoning_content")
    },
    "parts": [
        user("Hi"),
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": "An answer"}],
        },
    ],
    "ShareGPT": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "An answer", "reasoning_content": THOUGHT}],
}


@pytest.mark.nightly(name=[name for name in TEMPLATES if name not in ("qwen3", "gptoss", "deepseekv3", "llama3_1")])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_field_of_every_shape_is_learned_or_named(name: str) -> None:
    tokenizer = tokenizer_for(name)
    last = {"train_on": "last_turn"}
    for shapes, tools in ((OF_CALLS, TOOLS), (OF_OLD_CALLS, json.dumps(TOOLS))):
        found = {shape: learned(tokenizer, turns, tools) for shape, turns in shapes.items()}
        assert len({str(one) for one in found.values()}) == 1, found
        one = next(iter(found.values()))
        if isinstance(one, list):
            written = "".join(one)
            assert "Paris" in written
            assert "weather" in written
            assert "knots" in written
            assert '{\\"city' not in written, "arguments that are encoded twice"
        else:
            assert re.search(r"leaves out|refused by the chat template|prompt, which|when later turns follow", one), one
    found = {shape: learned(tokenizer, turns, **last) for shape, turns in OF_REASONING.items()}
    assert len({str(one) for one in found.values()}) == 1, found
    one = found["parts"]
    assert THOUGHT in one[0] if isinstance(one, list) else re.search(r"has reasoning in turn 1|prompt, which", one), one


@pytest.mark.parametrize(
    ("turns", "sentence"),
    [
        ([user("Hi"), {"role": "asistant", "content": "Hello"}], "has the role 'asistant' in turn 1; expected one of"),
        ([user("Hi"), {"role": "assistant", "content": ""}], "has an empty answer in turn 1"),
        (called(content="", tool_calls=[{"function": {"arguments": "{}"}}]), "expected the name of a function"),
        (called(content="", tool_calls=[{"function": CALLED | {"arguments": "{"}}]), "which is no JSON"),
        (called(content="", tool_calls=[{"function": CALLED | {"arguments": "[1]"}}]), "expected an object"),
        (called(content="", tool_calls=3), "expected a list of objects"),
        ([user("Hi"), assistant("Hello", reasoning_content=3)], "has 3 for the reasoning of turn 1; expected text"),
    ],
)
def test_turns_that_are_refused(turns: list[dict[str, Any]], sentence: str) -> None:
    assert sentence in learned(tokenizer_for("qwen2_5"), turns)


def test_a_developer_is_a_system_where_the_template_has_none() -> None:
    found = []
    for role in ("developer", "system"):
        turns = [{"role": role, "content": "Be brief"}, *KINDS["one"]]
        (ids,) = Encoder(tokenizer_for("qwen2_5"), Format(), 268)(row_of(turns))["ids"]
        found.append(list(ids))
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{"temperature": 0.9, "top_p": 0.6}, {"pad_token_id": -1}])
def test_generation_settings_that_transformers_does_not_write(
    settings: dict[str, Any], data: Path, cache: Path, tmp_path: Path
) -> None:
    """It reads them: they are in the export as the base has them, with the token that ends an answer."""
    base = write_base(cache, tmp_path / "base")
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATES["demo"].replace("<|end|>", "<|user|>")
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text(json.dumps(settings))
    changes: dict[str, Any] = {"model": str(base), "tokenizer": None, "steps": 1, "eval_fraction": 0.0}
    train(config_for(data, tmp_path / "cache", tmp_path / "run", **changes))
    export(tmp_path / "run", tmp_path / "model", step=None)
    found = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert settings.items() <= found.items()
    assert tokenizer.convert_tokens_to_ids("<|user|>") in found["eos_token_id"]


PAGE = ROOT / "docs" / "chat_templates.md"
FIELDS: dict[str, tuple[list[dict[str, Any]], Any, dict[str, Any]]] = {
    "system": ([{"role": "system", "content": "Be brief"}, user("Hi"), assistant("An answer")], None, {}),
    "several turns": (KINDS["turns"], None, {}),
    "tools and calls": (OF_CALLS["OpenAI, arguments as JSON"], TOOLS, {}),
    "reasoning": (OF_REASONING["reasoning_content"], None, {"train_on": "last_turn"}),
}
HEAD = """# Chat templates and the fields of a row

Which fields of a conversation a template writes into the text that is trained on: {count} templates, those that TRL
{version} ships and three more. *trained*: every word of the field is in the text, and the tokens of the answers are
labels. *bad row*: the template leaves the field out, or its labels cannot be determined; the row is not trained on, and
the message names the field ([labels](training.md#which-tokens-are-labels)). Reasoning is that of the last answer, with
`--train_on last_turn`. `make templates` writes this page.

| {fields} | templates |
|---|{lines}
"""


def outcome_of(name: str) -> tuple[str, ...]:
    tokenizer = tokenizer_for(name)
    found = [learned(tokenizer, turns, tools, **options) for turns, tools, options in FIELDS.values()]
    return tuple("trained" if isinstance(one, list) else "bad row" for one in found)


def rows_of_the_page() -> list[str]:
    """Makes a row for each outcome, those with most trained fields first."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(TEMPLATES):
        names.setdefault(outcome_of(name), []).append(name)
    outcomes = sorted(names, key=lambda outcome: (-outcome.count("trained"), [one != "trained" for one in outcome]))
    return [f"| {' | '.join(outcome)} | {', '.join(names[outcome])} |" for outcome in outcomes]


def test_the_page_has_every_template(request: pytest.FixtureRequest) -> None:
    head = HEAD.format(
        count=len(TEMPLATES), version=trl.__version__, fields=" | ".join(FIELDS), lines="---|" * len(FIELDS)
    )
    page = head + "\n".join(rows_of_the_page()) + "\n"
    if request.config.getoption("--write-pages"):
        PAGE.write_text(page)
    if f"{trl.__version__} ships" not in PAGE.read_text():
        pytest.skip("the page was written with another release of TRL")
    assert PAGE.read_text() == page
