"""Chat templates written for the tests, each of the shape of one model family."""

# SmolLM2, Qwen2: every role under its own name, a default system turn.
CHATML = (
    "{%- for m in messages -%}"
    "{%- if loop.first and m.role != 'system' -%}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

# Llama-3: one BOS, two blank lines after a header, contents stripped.
LLAMA3 = (
    "{{- bos_token -}}"
    "{%- for m in messages -%}"
    "{{ '<|head|>' ~ m.role ~ '<|/head|>\n\n' ~ (m.content | trim) ~ '<|eot|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|head|>assistant<|/head|>\n\n' }}{%- endif -%}"
)

# Gemma: the system text opens the first user turn, roles must alternate, answers are "model".
GEMMA = (
    "{{- bos_token -}}"
    "{%- set ns = namespace(start='', turns=messages) -%}"
    "{%- if messages[0].role == 'system' -%}"
    "{%- set ns.start = (messages[0].content | trim) ~ '\n\n' -%}"
    "{%- set ns.turns = messages[1:] -%}"
    "{%- endif -%}"
    "{%- for m in ns.turns -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Roles must alternate user/assistant') }}"
    "{%- endif -%}"
    "{%- set name = 'model' if m.role == 'assistant' else m.role -%}"
    "{{ '<turn>' ~ name ~ '\n' ~ (ns.start if loop.first else '') }}"
    "{{- (m.content | trim) ~ '</turn>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}"
)

# Gemma-2: a system turn is refused.
NO_SYSTEM = (
    "{%- if messages[0].role == 'system' -%}"
    "{{ raise_exception('System role not supported') }}"
    "{%- endif -%}" + GEMMA
)

# Qwen3: thoughts leave the history; the last answer, and a generation header without thinking,
# get an empty thought.
QWEN3 = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- set text = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content -%}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last -%}"
    "{{ '<think>\n\n</think>\n\n' }}"
    "{%- endif -%}"
    "{{ text ~ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{ '<think>\n\n</think>\n\n' }}"
    "{%- endif -%}"
    "{%- endif -%}"
)

# Mistral: no header before an answer, its end token after it; the system text moves into the
# LAST user turn, so that history changes.
MISTRAL = (
    "{{- bos_token -}}"
    "{%- set sys = messages[0].content if messages[0].role == 'system' else none -%}"
    "{%- set turns = messages[1:] if sys is not none else messages -%}"
    "{%- set ns = namespace(last=0) -%}"
    "{%- for m in turns -%}"
    "{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for m in turns -%}"
    "{%- if m.role == 'user' -%}"
    "{{ '[INST] ' ~ (sys ~ '\n\n' if sys is not none and loop.index0 == ns.last else '')"
    " ~ m.content ~ '[/INST]' }}"
    "{%- else -%}"
    "{{ m.content ~ '</s>' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)

# Gemma-4: turns of their own for system texts and for tools; a thought opens an answer's turn, and
# leaves it once another question follows; without thinking an empty one closes the header.
GEMMA4 = (
    "{%- macro value(v) -%}"
    "{%- if v is string -%}{{ '<|q|>' ~ v ~ '<|q|>' }}{%- else -%}{{ v | tojson }}{%- endif -%}"
    "{%- endmacro -%}"
    "{{- bos_token -}}"
    "{%- set ns = namespace(last=-1, open=false) -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if tools or enable_thinking | default(false) -%}"
    "{{ '<|turn>system\n' ~ ('<|think|>' if enable_thinking | default(false) else '') }}"
    "{%- for t in tools or [] -%}"
    "{{ '<|tool>' ~ t.function.name ~ ' ' ~ (t.function.parameters | tojson) ~ '<tool|>' }}"
    "{%- endfor -%}"
    "{{ '<turn|>\n' }}"
    "{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{{ '<|tool_response>' ~ value(m.content) ~ '<tool_response|>' }}"
    "{%- else -%}"
    "{%- if not ns.open -%}"
    "{{ '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}"
    "{%- endif -%}"
    "{%- if m.reasoning_content and loop.index0 > ns.last -%}"
    "{{ '<|channel>thought\n' ~ m.reasoning_content ~ '\n<channel|>' }}"
    "{%- endif -%}"
    "{{ m.content | trim }}"
    "{%- for c in m.tool_calls or [] -%}"
    "{{ '<|tool_call>call:' ~ c.function.name ~ '{' }}"
    "{%- for k, v in c.function.arguments | dictsort -%}"
    "{{ k ~ ':' ~ value(v) ~ ',' }}"
    "{%- endfor -%}"
    "{{ '}<tool_call|>' }}"
    "{%- endfor -%}"
    "{%- set ns.open = m.tool_calls is defined -%}"
    "{%- if not ns.open -%}{{ '<turn|>\n' }}{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt and not ns.open -%}"
    "{{ '<|turn>model\n' }}"
    "{%- if not enable_thinking | default(true) -%}"
    "{{ '<|channel>thought\n<channel|>' }}"
    "{%- endif -%}"
    "{%- endif -%}"
)

# Qwen3 and SmolLM3 with tools: their definitions as JSON in the system turn, calls as JSON, results
# in a user turn, thoughts between tags.
TOOLS = (
    "{%- if tools -%}"
    "{{ '<|im_start|>system\n' }}"
    "{%- for t in tools -%}{{ t | tojson ~ '\n' }}{%- endfor -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endif -%}"
    "{%- for m in messages -%}"
    "{{ '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) ~ '\n' }}"
    "{%- if m.role == 'tool' -%}"
    "{{ 'result: ' ~ (m.content | tojson) }}"
    "{%- else -%}"
    "{%- if m.reasoning_content -%}"
    "{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}"
    "{%- endif -%}"
    "{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}"
    "{{ 'call ' ~ c.function.name ~ ' ' ~ (c.function.arguments | tojson) }}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\n' ~ ('<think>\n' if open_thought | default(false) else '') }}"
    "{%- endif -%}"
)

ALL = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "gemma4": GEMMA4,
    "tools": TOOLS,
}

SPECIAL_TOKENS = [
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<turn>",
    "</turn>",
    "[INST]",
    "[/INST]",
    "</s>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|q|>",
]

# The token that ends an answer under each template.
END_OF_TURN = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot|>",
    "gemma": "</turn>",
    "qwen3": "<|im_end|>",
    "mistral": "</s>",
    "gemma4": "<turn|>",
    "tools": "<|im_end|>",
}
