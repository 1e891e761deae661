//! Every field of every request, as data: what `/openapi.json` and the reference page show. A test holds these tables against the
//! names that the handlers ask for.

use crate::{chats, embeddings, fields::Neutral, generations, llama_cpp, options, params};

/// A field that is honoured.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) of: Of,
    pub(crate) note: &'static str,
}

/// The values of a field.
#[derive(Debug)]
pub(crate) enum Of {
    Bool,
    Integer(i64, i64),
    Number(f64, f64),
    Text,
    Choice(&'static [&'static str]),
    /// A text or a list of texts.
    Texts,
    TextList,
    Ids,
    Object,
    ObjectList,
    /// A list of lists of objects.
    Chats,
    /// A text, a list of texts, a list of token ids, or a list of such lists.
    Prompt,
    Any,
}

const fn field(name: &'static str, of: Of, note: &'static str) -> Field {
    Field { name, of, note }
}

const U32: i64 = u32::MAX as i64;

/// Sampling, lengths and reports, of chat, completions and llama.cpp's completion.
const COMMON: &[Field] = &[
    field("model", Of::Text, "the served model's name; without it, the served one"),
    field("max_tokens", Of::Integer(0, U32), "most tokens of the answer"),
    field("max_completion_tokens", Of::Integer(1, U32), "as `max_tokens`, before it"),
    field("min_tokens", Of::Integer(0, U32), "tokens before which only the length ends the answer"),
    field("n", Of::Integer(1, 128), "answers for each prompt"),
    field("stream", Of::Bool, "server-sent events"),
    field("temperature", Of::Number(0.0, 100.0), "0 is greedy"),
    field("top_p", Of::Number(0.0, 1.0), "nucleus sampling; above 0"),
    field("top_k", Of::Integer(-1, U32), "-1 and 0 keep all tokens"),
    field("min_p", Of::Number(0.0, 1.0), "drops tokens under this part of the likeliest one's probability"),
    field("seed", Of::Integer(i64::MIN, i64::MAX), "equal seeds give equal draws"),
    field("stop", Of::Texts, "up to 16 texts that end the answer"),
    field("stop_token_ids", Of::Ids, "up to 256 tokens that end the answer"),
    field("ignore_eos", Of::Bool, "the model's own ends do not end the answer"),
    field("skip_special_tokens", Of::Bool, "special tokens have no text; true by default"),
    field("presence_penalty", Of::Number(-2.0, 2.0), "on tokens that the answer has"),
    field("frequency_penalty", Of::Number(-2.0, 2.0), "on tokens for each time that the answer has them"),
    field("repetition_penalty", Of::Number(0.01, 100.0), "factor on tokens of prompt and answer"),
    field("repeat_penalty", Of::Number(0.01, 100.0), "llama.cpp's name of `repetition_penalty`"),
    field("repeat_last_n", Of::Integer(-1, U32), "penalties count all tokens: with one, -1 or the context"),
    field("logit_bias", Of::Any, "numbers from -100 to 100 by token id"),
    field("allowed_token_ids", Of::Ids, "only these tokens are drawn"),
    field("bad_words", Of::TextList, "texts that the answer does not contain"),
    field("truncate_prompt_tokens", Of::Integer(-1, U32), "only the last tokens of the prompt are used"),
    field("priority", Of::Integer(i32::MIN as i64, i32::MAX as i64), "lower numbers are admitted first"),
    field("cache_salt", Of::Text, "only equal salts share cached KV"),
    field("response_format", Of::Object, "`type` text, json_object, or json_schema with its `schema`"),
    field("structured_outputs", Of::Object, "one of `json`, `regex`, `choice`, `grammar`, `json_object`"),
    field("guided_json", Of::Any, "the answer has this JSON schema"),
    field("guided_regex", Of::Text, "the answer matches this regular expression"),
    field("guided_choice", Of::TextList, "the answer is one of these texts"),
    field("guided_grammar", Of::Text, "the answer is in this grammar, in llguidance's Lark or in GBNF"),
    field("grammar", Of::Text, "llama.cpp's name of `guided_grammar`"),
    field("json_schema", Of::Any, "as `guided_json`"),
    field("return_token_ids", Of::Bool, "token ids beside the texts"),
    field("lagoon_resume", Of::Object, "between a gateway and instances: an answer that another instance began"),
];

/// Reports of chat and completions.
const REPORTS: &[Field] = &[
    field("stream_options", Of::Object, "`include_usage`, `continuous_usage_stats`; with `stream`"),
    field("include_stop_str_in_output", Of::Bool, "the stop string is part of the answer"),
    field("prompt_logprobs", Of::Integer(0, 20), "log-probabilities of the prompt's tokens"),
    field("return_logits", Of::Bool, "logits of each token; needs --expose-logits"),
];

const TOOLS: &[Field] = &[
    field("tools", Of::ObjectList, "functions that may be called"),
    field("tool_choice", Of::Any, "`auto`, `none`, `required`, or the function that must be called"),
    field("parallel_tool_calls", Of::Bool, "false ends the answer behind one call"),
    field("reasoning_effort", Of::Text, "for templates that have it"),
    field("thinking", Of::Object, "`type` enabled or disabled, for templates that have it"),
    field("chat_template_kwargs", Of::Object, "further variables of the template"),
    field("add_generation_prompt", Of::Bool, "the prompt opens the answer; true by default"),
];

const CHAT: &[Field] = &[field("messages", Of::ObjectList, "the chat")];

const BATCH: &[Field] = &[field("messages", Of::Chats, "up to 128 chats")];

const CHAT_LOGPROBS: &[Field] = &[
    field("logprobs", Of::Bool, "log-probabilities of the answer's tokens"),
    field("top_logprobs", Of::Integer(0, 20), "likeliest tokens to list with them"),
];

const COMPLETIONS: &[Field] = &[
    field("prompt", Of::Prompt, "the prompt or prompts"),
    field("logprobs", Of::Integer(0, 20), "log-probabilities of tokens, with so many likeliest ones"),
    field("echo", Of::Bool, "the answer begins with the prompt"),
    field("add_special_tokens", Of::Bool, "the prompt begins as the tokenizer begins texts; true by default"),
];

const EMBEDDINGS: &[Field] = &[
    field("model", Of::Text, "the served model's name; without it, the served one"),
    field("input", Of::Prompt, "up to 2048 texts"),
    field("encoding_format", Of::Choice(&["float", "base64"]), "numbers, or little-endian f32 in base64"),
    field("dimensions", Of::Integer(1, U32), "only the first numbers, of length 1 again"),
    field("normalize", Of::Bool, "whether embeddings have length 1; the model's own setting by default"),
    field("use_activation", Of::Bool, "vLLM's newer name of `normalize`"),
    field("add_special_tokens", Of::Bool, "as the tokenizer begins and ends texts; true by default"),
    field("truncate_prompt_tokens", Of::Integer(-1, U32), "only the last tokens of a text are used"),
    field("priority", Of::Integer(i32::MIN as i64, i32::MAX as i64), "lower numbers are admitted first"),
    field("cache_salt", Of::Text, "only equal salts share cached KV"),
];

const TOKENIZE: &[Field] = &[
    field("model", Of::Text, "the served model's name"),
    field("prompt", Of::Text, "the text, or"),
    field("messages", Of::ObjectList, "a chat, or"),
    field("content", Of::Text, "llama.cpp: the text"),
    field("add_special_tokens", Of::Bool, "with `prompt` true by default, with `messages` false"),
    field("return_token_strs", Of::Bool, "tokens as the vocabulary spells them"),
    field("add_special", Of::Bool, "llama.cpp, with `content`: as `add_special_tokens`; false by default"),
    field("with_pieces", Of::Bool, "llama.cpp, with `content`: tokens with their texts"),
];

const DETOKENIZE: &[Field] =
    &[field("model", Of::Text, "the served model's name"), field("tokens", Of::Ids, "the tokens")];

const NATIVE: &[Field] = &[
    field("prompt", Of::Any, "a text, texts and token ids mixed, or several prompts"),
    field(
        "n_predict",
        Of::Integer(-2, U32),
        "most tokens of the answer; below 0 until its end, 0: only the prompt is computed",
    ),
    field("n_cmpl", Of::Integer(1, 128), "answers for each prompt"),
    field("n_probs", Of::Integer(0, 20), "likeliest tokens to list with each"),
    field("return_tokens", Of::Bool, "token ids beside the text"),
    field("timings_per_token", Of::Bool, "times in every event"),
];

const APPLY: &[Field] =
    &[field("model", Of::Text, "the served model's name"), field("messages", Of::ObjectList, "the chat")];

/// Fields with values that change nothing.
type Neutrals = &'static [(&'static str, Neutral)];

const TEMPLATES: Neutrals = &[("continue_final_message", Neutral::Bool(false)), ("chat_template", Neutral::Null)];
const TOKENIZE_NEUTRAL: Neutrals = &[("parse_special", Neutral::Bool(true))];
const CHAT_TIMINGS: Neutrals = &[("timings_per_token", Neutral::Any)];

/// The requests of one route.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) path: &'static str,
    pub(crate) fields: &'static [&'static [Field]],
    /// Those of `fields` that this route takes only with values that change nothing.
    pub(crate) narrowed: Neutrals,
    pub(crate) neutral: &'static [Neutrals],
    pub(crate) required: &'static [&'static str],
}

impl Body {
    pub(crate) fn supported(&self) -> impl Iterator<Item = &'static Field> {
        let narrowed = |name: &str| self.narrowed.iter().any(|(narrowed, _)| *narrowed == name);
        self.fields.iter().flat_map(|fields| fields.iter()).filter(move |field| !narrowed(field.name))
    }

    /// Fields that are taken only with a value that changes nothing, but for those that the table has as supported.
    pub(crate) fn neutral(&self) -> impl Iterator<Item = (&'static str, Neutral)> {
        let known = |name: &str| self.supported().any(|field| field.name == name);
        let tables = std::iter::once(&self.narrowed).chain(self.neutral);
        tables.flat_map(|table| table.iter().copied()).filter(move |(name, _)| !known(name))
    }
}

/// Every route that takes a body.
pub(crate) const BODIES: &[Body] = &[
    Body {
        path: "/v1/chat/completions",
        fields: &[CHAT, CHAT_LOGPROBS, COMMON, REPORTS, TOOLS],
        narrowed: &[],
        neutral: &[params::UNSUPPORTED, options::LLAMA_CPP_UNSUPPORTED, chats::UNSUPPORTED, CHAT_TIMINGS],
        required: &["messages"],
    },
    Body {
        path: "/v1/chat/completions/batch",
        fields: &[BATCH, CHAT_LOGPROBS, COMMON, REPORTS, TOOLS],
        narrowed: chats::UNSUPPORTED_IN_BATCH,
        neutral: &[params::UNSUPPORTED, options::LLAMA_CPP_UNSUPPORTED, chats::UNSUPPORTED, CHAT_TIMINGS],
        required: &["messages"],
    },
    Body {
        path: "/v1/completions",
        fields: &[COMPLETIONS, COMMON, REPORTS],
        narrowed: &[],
        neutral: &[params::UNSUPPORTED, options::LLAMA_CPP_UNSUPPORTED, generations::UNSUPPORTED],
        required: &["prompt"],
    },
    Body {
        path: "/v1/embeddings",
        fields: &[EMBEDDINGS],
        narrowed: &[],
        neutral: &[embeddings::UNSUPPORTED],
        required: &["input"],
    },
    Body {
        path: "/completion",
        fields: &[NATIVE, COMMON],
        narrowed: &[],
        neutral: &[params::UNSUPPORTED, options::LLAMA_CPP_UNSUPPORTED, llama_cpp::UNREPORTED],
        required: &["prompt"],
    },
    Body {
        path: "/completions",
        fields: &[NATIVE, COMMON],
        narrowed: &[],
        neutral: &[params::UNSUPPORTED, options::LLAMA_CPP_UNSUPPORTED, llama_cpp::UNREPORTED],
        required: &["prompt"],
    },
    Body {
        path: "/tokenize",
        fields: &[TOKENIZE, TOOLS],
        narrowed: &[],
        neutral: &[TEMPLATES, TOKENIZE_NEUTRAL],
        required: &[],
    },
    Body { path: "/detokenize", fields: &[DETOKENIZE], narrowed: &[], neutral: &[], required: &["tokens"] },
    Body {
        path: "/apply-template",
        fields: &[APPLY, TOOLS],
        narrowed: &[],
        neutral: &[TEMPLATES],
        required: &["messages"],
    },
];

/// The body of a route.
pub(crate) fn body(path: &str) -> Option<&'static Body> {
    BODIES.iter().find(|body| body.path == path)
}
