//! Compiles grammars for one model, on threads of their own, bounded in size, number and time.

use crate::environment::Environment;
use crate::error::GrammarError;
use crate::gbnf;
use crate::schema;
use lagoon_text::Tokenizer;
use lagoon_types::Grammar;
use lagoon_types::limits::{CHOICES_MAX, GRAMMAR_BYTES_MAX};
use llguidance::Matcher;
use llguidance::api::TopLevelGrammar;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Compiled grammars that are kept for later requests.
const COMPILED_MAX: usize = 32;
/// Grammars that are compiled at once.
const COMPILES_MAX: usize = 4;
/// Time in which a grammar must be compiled. The first one of a model also waits for the vocabulary's trie.
const COMPILE_MS_MAX: u64 = 10_000;
/// Stack of a compiling thread: the compiler recurses along nested parts and chains of rules.
const STACK_BYTES: usize = 256 << 20;
/// Brackets of a grammar's text, nested or not, that the stack has room for.
const BRACKETS_MAX: usize = 8192;
/// Lines of a grammar's text: the compiler's time for the error of a long chain of rules grows with their square.
const GRAMMAR_LINES_MAX: usize = 2000;
/// Characters of the compiler's own message that are passed on.
const MESSAGE_MAX: usize = 600;

/// The grammars of one model; clones share them. Cheap until the first grammar.
#[derive(Clone, Debug)]
pub struct Grammars(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    tokenizer: Arc<Tokenizer>,
    vocab: u32,
    ends: Vec<u32>,
    environment: OnceLock<Result<Arc<Environment>, GrammarError>>,
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    /// The longest unused first.
    compiled: Vec<Arc<Compilation>>,
    running: usize,
}

/// A grammar that is compiled or is being compiled.
pub(crate) struct Compilation {
    grammar: Grammar,
    begun: Instant,
    result: Mutex<Option<Result<Compiled, GrammarError>>>,
    done: Condvar,
}

/// A grammar at its beginning, in the environment of its model.
#[derive(Clone)]
pub(crate) struct Compiled {
    pub(crate) environment: Arc<Environment>,
    matcher: Arc<Mutex<Matcher>>,
}

impl std::fmt::Debug for Compilation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compilation").field("grammar", &self.grammar).finish_non_exhaustive()
    }
}

/// The value behind a mutex, whatever panicked with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Compiled {
    /// A matcher of one answer, which shares nothing with those of other answers.
    pub(crate) fn matcher(&self) -> Matcher {
        lock(&self.matcher).deep_clone()
    }
}

impl Compilation {
    /// The result, once there is one. Late compilations count as failed.
    pub(crate) fn poll(&self) -> Option<Result<Compiled, GrammarError>> {
        let late = || (self.begun.elapsed() > Duration::from_millis(COMPILE_MS_MAX)).then(too_slow);
        lock(&self.result).clone().or_else(late)
    }

    fn wait(&self) -> Result<Compiled, GrammarError> {
        let left = Duration::from_millis(COMPILE_MS_MAX).saturating_sub(self.begun.elapsed());
        let waited = self.done.wait_timeout_while(lock(&self.result), left, |result| result.is_none());
        let (result, _) = waited.unwrap_or_else(PoisonError::into_inner);
        result.clone().unwrap_or_else(too_slow)
    }
}

fn too_slow<T>() -> Result<T, GrammarError> {
    Err(GrammarError::TooSlow(COMPILE_MS_MAX))
}

impl Grammars {
    /// The grammars of a model with `vocab` tokens, of which `ends` end an answer.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: u32, ends: &[u32]) -> Self {
        let mut ends = ends.to_vec();
        ends.extend(tokenizer.eos_id());
        ends.sort_unstable();
        ends.dedup();
        Self(Arc::new(Shared {
            tokenizer,
            vocab,
            ends,
            environment: OnceLock::new(),
            cache: Mutex::new(Cache::default()),
        }))
    }

    /// Compiles a grammar, or finds it compiled; blocks until it is done. Later matchers of the grammar find it.
    ///
    /// # Errors
    /// If no answer could be held to it; see [`GrammarError`].
    pub fn check(&self, grammar: &Grammar) -> Result<(), GrammarError> {
        self.begin(grammar)?.wait().map(drop)
    }

    /// A grammar that is compiled, or begins to be.
    pub(crate) fn begin(&self, grammar: &Grammar) -> Result<Arc<Compilation>, GrammarError> {
        let mut cache = lock(&self.0.cache);
        if let Some(at) = cache.compiled.iter().position(|known| known.grammar == *grammar) {
            let known = cache.compiled.remove(at);
            // A failure by time is no property of the grammar.
            if !matches!(known.poll(), Some(Err(GrammarError::TooSlow(_)))) {
                cache.compiled.push(Arc::clone(&known));
                return Ok(known);
            }
        }
        if cache.running >= COMPILES_MAX {
            return Err(GrammarError::Busy(COMPILES_MAX));
        }
        let compilation = Arc::new(Compilation {
            grammar: grammar.clone(),
            begun: Instant::now(),
            result: Mutex::new(None),
            done: Condvar::new(),
        });
        let (shared, of) = (Arc::clone(&self.0), Arc::clone(&compilation));
        let thread = std::thread::Builder::new().name("lagoon-grammar".into()).stack_size(STACK_BYTES);
        thread.spawn(move || shared.run(&of)).map_err(|_no_thread| GrammarError::Busy(COMPILES_MAX))?;
        cache.running += 1;
        cache.compiled.push(Arc::clone(&compilation));
        if cache.compiled.len() > COMPILED_MAX {
            cache.compiled.remove(0);
        }
        Ok(compilation)
    }
}

impl Shared {
    /// Compiles on this thread.
    fn run(&self, of: &Compilation) {
        let made = catch_unwind(AssertUnwindSafe(|| self.compile(&of.grammar)));
        let result = made.unwrap_or_else(|_panicked| Err(GrammarError::Invalid("the compiler failed".to_owned())));
        // First: whoever waits for the result may begin another one.
        lock(&self.cache).running -= 1;
        *lock(&of.result) = Some(result);
        of.done.notify_all();
    }

    fn environment(&self) -> Result<Arc<Environment>, GrammarError> {
        let made = || Environment::new(&self.tokenizer, self.vocab, &self.ends).map(Arc::new);
        self.environment.get_or_init(made).clone()
    }

    fn compile(&self, grammar: &Grammar) -> Result<Compiled, GrammarError> {
        let top = top_level(grammar)?;
        let environment = self.environment()?;
        let invalid = |message: String| GrammarError::Invalid(format!("the grammar is not valid: {}", short(&message)));
        let parser = environment.factory.create_parser(top).map_err(|error| invalid(error.to_string()))?;
        let mut matcher = Matcher::new(Ok(parser));
        let first = matcher.compute_mask().map_err(|error| invalid(error.to_string()))?;
        if first.is_zero() {
            return Err(invalid("no text of this model's tokens begins as it asks".to_owned()));
        }
        Ok(Compiled { environment, matcher: Arc::new(Mutex::new(matcher)) })
    }
}

/// The compiler's message, without its further lines where it is long.
fn short(message: &str) -> String {
    let end = message.char_indices().nth(MESSAGE_MAX).map_or(message.len(), |(at, _)| at);
    message[..end].trim().to_owned()
}

fn top_level(grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
    let invalid = |message: String| Err(GrammarError::Invalid(message));
    let bytes = grammar.bytes();
    if bytes > GRAMMAR_BYTES_MAX {
        return invalid(format!("the grammar has {bytes} bytes, but at most {GRAMMAR_BYTES_MAX} are allowed"));
    }
    match grammar {
        Grammar::JsonSchema(text) => {
            let schema = serde_json::from_str(text);
            let schema = schema.map_err(|error| GrammarError::Invalid(format!("the schema is not JSON: {error}")))?;
            Ok(TopLevelGrammar::from_json_schema(schema::compilable(schema)?))
        }
        Grammar::Regex(text) => {
            check_brackets(text)?;
            Ok(TopLevelGrammar::from_regex(unanchored(text)))
        }
        Grammar::Choice(texts) => {
            if texts.is_empty() || texts.len() > CHOICES_MAX || texts.iter().any(String::is_empty) {
                return invalid(format!("a choice has 1 to {CHOICES_MAX} texts, none of them empty"));
            }
            let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
            Ok(TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}\n", texts.join("\n  | "))))
        }
        Grammar::Lark(text) => {
            check_brackets(text)?;
            let lines = text.lines().count();
            if lines > GRAMMAR_LINES_MAX {
                return invalid(format!("the grammar has {lines} lines, but at most {GRAMMAR_LINES_MAX} are allowed"));
            }
            let is_gbnf = gbnf::begins_as_gbnf(text);
            Ok(TopLevelGrammar::from_lark(if is_gbnf { gbnf::to_lark(text)? } else { text.clone() }))
        }
    }
}

/// Refuses texts whose nesting the compiler's stack may not hold.
fn check_brackets(text: &str) -> Result<(), GrammarError> {
    let brackets = text.bytes().filter(|byte| b"([{".contains(byte)).count();
    if brackets <= BRACKETS_MAX {
        return Ok(());
    }
    Err(GrammarError::Invalid(format!("the grammar has {brackets} brackets, but at most {BRACKETS_MAX} are allowed")))
}

/// A text as Lark writes it.
fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A regular expression without the anchors that it has anyway: the whole answer matches.
fn unanchored(text: &str) -> &str {
    let text = text.strip_prefix('^').unwrap_or(text);
    match text.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 0 => rest,
        _ => text,
    }
}
