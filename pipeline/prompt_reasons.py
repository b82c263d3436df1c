"""Why prompts are rejected; docs/prompts.md has the same table."""

# What each reject code means. The codes from `template_refused` on come from rendering.
REJECT_REASONS: dict[str, str] = {
    "line_too_long": "the row is longer than 64 MiB",
    "bad_encoding": "the text is not valid UTF-8",
    "bad_json": "the row is not one JSON value, or the array around it is broken off",
    "too_deep": "the JSON nests deeper than 100 levels",
    "duplicate_key": "an object of the row has the same key twice",
    "non_finite_number": "the row has NaN, Infinity or a number too large to hold",
    "not_an_object": "the row is JSON, but not an object",
    "no_messages": "none of messages, conversations, instruction, prompt, text, input_ids is given",
    "both_conventions": "two of the same kind are given: messages and conversations, instruction "
    "and prompt, text and input_ids, tools and functions",
    "empty_conversation": "the conversation has no turns",
    "bad_turn": "the conversation is no list, or a turn is not one role and one content",
    "unknown_role": "the role is none of user/human, assistant/gpt/model, system/developer, "
    "tool/function/observation/ipython, function_call",
    "empty_content": "a turn's content is null, empty or blank",
    "bad_content": "a turn's content is neither text nor a list of text parts",
    "bad_tool": "the tools are no list of objects with a name",
    "bad_tool_call": "a tool call has no name, its arguments are no JSON object, or it is no "
    "assistant's",
    "bad_token_ids": "input_ids are no list of whole numbers, or not of the vocabulary",
    "bad_loss_mask": "loss_mask is not 0 or 1 for each of the input_ids",
    "lone_surrogate": "a text has half a surrogate pair, which is no character",
    "system_not_first": "a system turn stands after another turn",
    "assistant_first": "an assistant turn comes before the first user turn",
    "consecutive_roles": "two turns of the same role follow each other",
    "tool_order": "a tool's turn follows no call, or a user's turn follows a tool's",
    "no_user_turn": "the conversation has no user turn",
    "bad_id": "the id is neither text nor a number, or is empty",
    "long_id": "the id is longer than 1024 characters",
    "duplicate_id": "an earlier row has the same id (or, without ids, the same conversation)",
    "duplicate": "with --dedup: an earlier row asks the same",
    "template_refused": "the chat template raised an error on this conversation",
    "template_limit": "rendering takes too much time, memory or text",
    "template_drops_text": "the chat template leaves out, repeats or rewrites the text of a turn, "
    "a thought that is to be kept, a tool or a tool call",
    "history_changes": "the chat template prints earlier turns differently once others follow",
    "control_token": "the text of a turn contains a control token of the tokenizer "
    "(`--control-tokens text` keeps it as text)",
    "bad_bos": "a text or its input_ids start without the BOS that the chat template prints, or "
    "with two",
    "no_open_answer": "a text or its input_ids do not end where an answer begins",
    "no_assistant_turn": "given turns were asked for, but there is no answer, or no telling where",
    "answers_touch": "the chat template puts nothing between two answers",
    "too_long": "the prompt leaves no room for an answer in --max-length or the target's context",
}
