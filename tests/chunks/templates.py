# ruff: noqa: E501  (a template is read in one piece)
"""Chat templates in the shapes of those that models of the supported families are published with.

Each shows one way in which templates read contents: as text alone, as text or parts, in parts for some roles only, as
JSON, with or without a system's turn, tools and reasoning.
"""

from __future__ import annotations

_GENERATION = "{% if add_generation_prompt %}<|sep|>assistant\n{% endif %}"
_TEXT = "{{ '<|sep|>' ~ m.role ~ '\n' ~ m.content ~ '</s>\n' }}"
_CALLS = (
    "{% for c in m.tool_calls %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n"
    "</tool_call>{% endfor %}"
)
_PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
_EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + _PARTS + "{% endif %}"


def _each(body: str, before: str = "") -> str:
    return before + "{% for m in messages %}" + body + "{% endfor %}" + _GENERATION


_ALTERNATES = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
_LIST_TOOLS = "{% if tools %}<|sep|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}</s>\n{% endif %}"

PUBLISHED = {
    "chatml": _each(_TEXT),
    "llama2": _each(
        _ALTERNATES
        + "{% if m.role == 'user' %}[INST] {{ m.content.strip() }} [/INST]{% else %} {{ m.content.strip() }} </s>"
        "{% endif %}"
    ),
    "llama3": _each("<|sep|>{{ m.role }}\n\n{{ m.content | trim }}</s>"),
    "llama3_1": _each(
        "{% if not (m.role == 'tool' or m.tool_calls) %}<|sep|>{{ m.role }}\n\n{{ m.content | trim }}</s>"
        "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
        "<|sep|>assistant\n\n{{ m.tool_calls[0].function.arguments | tojson }}</s>"
        "{% else %}<|sep|>ipython\n\n"
        "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
        "</s>{% endif %}",
        _LIST_TOOLS,
    ),
    "llama3_2": _each(
        "<|sep|>{{ m.role }}\n\n{% if m.tool_calls %}" + _CALLS + "{% else %}{{ m['content'] | trim }}{% endif %}</s>",
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
        "{% set messages = messages[1:] %}<|sep|>system\n\n{{ system }}</s>{% endif %}",
    ),
    "mistral_v1": "{{ bos_token }}"
    + _each(
        _ALTERNATES
        + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content ~ eos_token }}{% endif %}"
    ),
    "mistral_v3": _each(
        "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls is defined and m.tool_calls %}[TOOL_CALLS] "
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}</s>"
        "{% elif m.role in ('tool', 'tool_results') %}"
        "{% set content = m.content.content if m.content.content is defined else m.content %}"
        '[TOOL_RESULTS] {"content": {{ content | string }}}[/TOOL_RESULTS]'
        "{% else %} {{ m.content }}</s>{% endif %}"
    ),
    "mistral_small_3_1": _each(
        "{% if m.role == 'user' %}{% if m.content is string %}[INST]{{ m.content }}[/INST]{% else %}[INST]"
        "{% for block in m['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}{% else %}[IMG]{% endif %}"
        "{% endfor %}[/INST]{% endif %}{% elif m.role == 'system' %}[SYSTEM]{{ m.content }}[/SYSTEM]"
        "{% elif m.role == 'assistant' %}{{ (m.content or '') + '</s>' }}"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content | string }}[/TOOL_RESULTS]"
        "{% else %}{{ raise_exception('unknown role') }}{% endif %}"
    ),
    "mixtral": _each(
        "{% if m.role == 'user' %}[INST] {{ m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
        "{{ m.content + '</s> ' }}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}"
    ),
    "qwen2": _each(_TEXT, "{% if messages[0].role != 'system' %}<|sep|>system\nYou help.</s>\n{% endif %}"),
    "qwen2_5": _each(
        "{% if m.role == 'assistant' and m.tool_calls %}<|sep|>assistant\n{% if m.content %}{{ m.content ~ '\n' }}{% endif %}"
        + _CALLS
        + "</s>\n{% elif m.role == 'tool' %}<|sep|>user\n<tool_response>\n{{ m.content }}\n</tool_response></s>\n"
        "{% else %}" + _TEXT + "{% endif %}",
        _LIST_TOOLS,
    ),
    "qwen2_vl": _each(
        "<|sep|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if 'text' in part %}{{ part['text'] }}{% else %}<image>{% endif %}{% endfor %}{% endif %}</s>\n"
    ),
    "qwen3": _each(
        "{% if m.content is string %}{% set content = m.content %}{% else %}{% set content = '' %}{% endif %}"
        "{% if m.role == 'assistant' %}{% set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}"
        "{% if not reasoning and '</think>' in content %}{% set reasoning = content.split('</think>')[0].split('<think>')[-1] %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|sep|>assistant\n{% if reasoning and loop.last %}<think>\n{{ reasoning.strip() }}\n</think>\n\n{% endif %}"
        "{{ content }}" + _CALLS + "</s>\n"
        "{% elif m.role == 'tool' %}<|sep|>user\n<tool_response>\n{{ content }}\n</tool_response></s>\n"
        "{% else %}<|sep|>{{ m.role }}\n{{ content }}</s>\n{% endif %}",
        _LIST_TOOLS,
    ),
    "gemma3": _each(
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ prefix.p if loop.first else '' }}"
        "{% if m.content is string %}{{ m.content | trim }}{% elif m.content is iterable %}{% for item in m['content'] %}"
        "{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}"
        "{% else %}{{ raise_exception('bad content') }}{% endif %}<end>\n",
        "{% set prefix = namespace(p='') %}{% if messages[0].role == 'system' %}{% if messages[0].content is string %}"
        "{% set prefix.p = messages[0].content ~ '\n\n' %}{% else %}"
        "{% set prefix.p = messages[0].content[0].text ~ '\n\n' %}{% endif %}"
        "{% set messages = messages[1:] %}{% endif %}",
    ),
    "phi3": _each("<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n"),
    "phi4": _each(
        "{% if m.role == 'system' and tools %}<|system|>{{ m.content }}<|tool|>{{ tools | tojson }}<|/tool|><|end|>"
        "{% else %}<|{{ m.role }}|>{{ m['content'] }}" + _CALLS + "<|end|>{% endif %}"
    ),
    "granite": _each(
        "{% if m.role == 'assistant' and m.tool_calls %}<role>assistant<end><|tool_call|>{{ m.tool_calls | tojson }}</s>"
        "{% elif m.role == 'tool' %}<role>tool_response<end>{{ m['content'] }}</s>"
        "{% else %}<role>{{ m['role'] }}<end>{{ m['content'] }}</s>{% endif %}\n",
        "{% if documents %}{% for d in documents %}<doc>{{ d.text }}</doc>{% endfor %}{% endif %}" + _LIST_TOOLS,
    ),
    "smollm3": _each(
        "{% set content = m.content if m.content is string else '' %}<|sep|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ content.lstrip('\n') ~ '</s>\n' }}{% else %}{{ content ~ '</s>\n' }}{% endif %}",
        "{% if enable_thinking is not defined or enable_thinking %}<|sep|>system\nThink.</s>\n{% endif %}",
    ),
    "olmo2": "{{ bos_token }}"
    + _each(
        "{% if m['role'] == 'system' %}<|system|>\n{{ m['content'] }}\n{% elif m['role'] == 'user' %}<|user|>\n"
        "{{ m['content'] + '\n' }}{% elif not loop.last %}<|assistant|>\n{{ m['content'] + eos_token + '\n' }}"
        "{% else %}<|assistant|>\n{{ m['content'] + eos_token }}{% endif %}"
    ),
    "deepseek_r1": _each(
        "{% if m.role == 'user' %}<User>{{ m.content }}{% elif m.role == 'assistant' and m.content is none %}"
        "<Assistant>" + _CALLS + "{% elif m.role == 'assistant' %}<Assistant>"
        "{{ m.content.split('</think>')[-1] if '</think>' in m.content else m.content }}</s>"
        "{% elif m.role == 'tool' %}<out>{{ m.content }}</out>{% else %}{{ m.content }}{% endif %}"
    ),
    "parts_for_users_alone": _each(
        "{% if m.role == 'user' %}<u>"
        + _EITHER
        + "</u>{% else %}<o>{{ m.content | string }}</o>"
        + _CALLS
        + "{% endif %}"
    ),
    "mistral_strict": _each(
        "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls is defined and m.tool_calls is not none %}"
        "[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}"
        "{{ raise_exception('ids have length 9') }}{% endif %}{{ c.function | tojson }}, {{ c.id }}{% endfor %}]</s>"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
        "{{ raise_exception('ids have length 9') }}{% endif %}[TOOL_RESULTS] {{ m.content | string }}[/TOOL_RESULTS]"
        "{% elif m.role == 'assistant' %} {{ m.content + '</s>' }}{% else %}{{ raise_exception('roles') }}{% endif %}",
        "{% set loop_messages = messages %}{% set ns = namespace(index=0) %}{% for m in loop_messages %}"
        "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}",
    ),
    "items_of_arguments": _each(
        "<|sep|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls %}<function={{ c.function.name }}>"
        "{% for key, value in c.function.arguments.items() %}<{{ key }}>{{ value }}{% endfor %}{% endfor %}</s>"
    ),
    "parts_alone": _each("<|sep|>{{ m.role }}\n" + _PARTS + _CALLS + "</s>\n"),
}
