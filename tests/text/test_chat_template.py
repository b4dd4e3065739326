import json
from pathlib import Path

import pytest

from trillion_infer.core.errors import InvalidRequestError, ModelLoadError
from trillion_infer.text import ChatTemplate, Tokenizer, encode_chat, render_chat

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"b":1, "a":"é"}'}}


def user(content):
    return [{"role": "user", "content": content}]


def render(source, messages, **options):
    return ChatTemplate(source).render(messages, **options)


def test_smollm2_prompt(smollm2_tokenizer):
    assert render_chat(smollm2_tokenizer, user("Hi")) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_ids_equal_transformers(smollm2_tokenizer):
    golden = json.loads((Path(__file__).parent / "golden_ids.json").read_text())
    for chat, ids in zip(golden["chats"], golden["smollm2"]["chats"], strict=True):
        assert encode_chat(smollm2_tokenizer, chat) == ids
        assert smollm2_tokenizer.encode(render_chat(smollm2_tokenizer, chat)) == ids


def test_u32_exactly_one_bos_on_every_path(byte_tokenizer):
    text = render_chat(byte_tokenizer, user("the"))
    ids = encode_chat(byte_tokenizer, user("the"))
    assert text.startswith("<|bos|>")
    assert ids.count(byte_tokenizer.bos_id) == 1
    assert byte_tokenizer.encode(text) == ids


def test_u34_text_parts_are_joined_for_a_template_of_strings():
    parts = [{"type": "text", "text": "who is"}, {"type": "text", "text": "mickey?"}]
    assert render(PLAIN, user(parts)) == "user:who is\nmickey?;"


def test_a_template_that_loops_over_content_gets_the_parts():
    assert render(PARTS, user([{"type": "input_text", "text": "a"}, "b"])) == "[a][b]"
    assert render(PARTS, user("plain")) == "plain"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video"])
@pytest.mark.parametrize("source", [PLAIN, PARTS])
def test_u34_a_part_that_is_no_text_is_named(source, kind):
    with pytest.raises(InvalidRequestError, match=f"messages\\[0\\].*'{kind}'"):
        render(source, user([{"type": kind, kind: {}}]))


def test_the_templates_own_message_is_the_error():
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", user("x"))


def test_a_failing_expression_is_a_request_error():
    with pytest.raises(InvalidRequestError, match="the chat template"):
        render("{{ messages[0].content + 3 }}", user("x"))
    with pytest.raises(InvalidRequestError, match="the chat template"):
        render("{{ messages[7].content }}", user("x"))


def test_a_missing_template_says_what_to_do(byte_metadata):
    bare = {k: v for k, v in byte_metadata.items() if k != "tokenizer.chat_template"}
    with pytest.raises(InvalidRequestError, match=r"no chat template.*chat_template"):
        render_chat(Tokenizer.from_gguf(bare), user("x"))


def test_a_broken_template_names_its_line():
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(InvalidRequestError):
        render(source, user("x"))


def test_tojson_escapes_neither_html_nor_other_scripts():
    assert render("{{ tools | tojson }}", user("x"), tools=[{"a": "<é'&>"}]) == '[{"a": "<é\'&>"}]'
    assert render("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}", user("x")) == '{"b":1,"a":2}'
    assert render("{{ [1] | tojson(indent=1) }}", user("x")) == "[\n 1\n]"


def test_blocks_trim_their_lines_and_loops_break():
    source = "{% for i in [1, 2, 3] %}\n    {% if i == 2 %}\n{% break %}\n    {% endif %}\n{{ i }}\n{% endfor %}\nend"
    assert render(source, user("x")) == "1\nend"


def test_generation_blocks_render_their_body():
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c", user("x")) == "ab1c"


def test_the_date_is_at_hand():
    assert render("{{ strftime_now('%Y') }}", user("x")).isdigit()


def test_extra_variables_reach_the_template():
    assert render("{{ enable_thinking }}{{ documents is none }}", user("x"), enable_thinking=False) == "FalseTrue"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'A' + c.arguments + 'B' }}", 'A{"b":1, "a":"é"}B'),
        ("{{ c.arguments }}", '{"b":1, "a":"é"}'),
        ("{{ c.arguments | tojson }}", '{"b": 1, "a": "é"}'),
        ("{% for k, v in c.arguments.items() %}{{ k }}={{ v }},{% endfor %}", "b=1,a=é,"),
        ("{{ c.arguments is mapping }}{{ c.arguments is string }}", "TrueFalse"),
    ],
)
def test_tool_arguments_suit_every_kind_of_template(source, expected):
    source = "{% set c = messages[0].tool_calls[0].function %}" + source
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert render(source, messages) == expected
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"b":1, "a":"é"}'


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", "3"])
def test_tool_arguments_that_are_no_object_are_refused(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].tool_calls\[0\].function.arguments"):
        render(PLAIN, [{"role": "assistant", "tool_calls": [call]}])


def test_a_call_without_content_has_none_and_an_empty_message_an_empty_string():
    source = "{# tool_calls #}{{ messages[0].content is none }}"
    assert render(source, [{"role": "assistant", "tool_calls": [CALL]}]) == "True"
    assert render(source, [{"role": "assistant"}]) == "False"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_known_by_both_names(name):
    messages = [{"role": "assistant", "content": "x", name: "hm"}]
    assert render("{{ messages[0].reasoning }}{{ messages[0].reasoning_content }}", messages) == "hmhm"


def test_the_last_message_can_be_continued():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is "}]
    assert render(PLAIN, messages, continue_final_message=True) == "user:q;assistant:The answer is"


@pytest.mark.parametrize("messages", [[], "hi", [3], [{"content": "x"}], user(5), None])
def test_malformed_messages_are_refused(messages):
    with pytest.raises(InvalidRequestError, match="messages"):
        render(PLAIN, messages)


def test_tools_are_none_when_there_are_none():
    for tools in (None, []):
        assert render("{{ tools is none }}", user("x"), tools=tools) == "True"
    assert json.loads(render("{{ tools | tojson }}", user("x"), tools=[CALL])) == [CALL]


def test_a_template_that_knows_no_calls_gets_them_as_text():
    messages = [*user("hi"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    messages += [{"role": "tool", "tool_call_id": CALL["id"], "content": "3"}]
    written = '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": "é"}}\n</tool_call>'
    assert render(PLAIN, messages) == f"user:hi;assistant:{written};tool:3;"
