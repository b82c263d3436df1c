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

ALL = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
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
]

# The token that ends an answer under each template.
END_OF_TURN = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot|>",
    "gemma": "</turn>",
    "qwen3": "<|im_end|>",
    "mistral": "</s>",
}
