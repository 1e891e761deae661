//! The matcher of one answer.
//!
//! A sequence owns it and adds its tokens; the runner asks it which tokens may come next, before it draws, and gives it what it
//! drew. What it was given beyond the answer's tokens (a step that was aborted) is taken back when it is asked again: the answer's
//! tokens alone count.

use crate::environment::Environment;
use crate::error::GrammarError;
use crate::grammars::{Compilation, Compiled, Grammars, lock};
use crate::reasoning::Place;
use lagoon_types::Constraint;
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use std::sync::{Arc, Mutex};

/// What may come next in an answer.
#[derive(Clone, Debug)]
pub enum Next {
    /// Any token.
    Any,
    /// The tokens whose bits are set.
    Of(SimpleVob),
    /// Nothing: the grammar has ended.
    Nothing,
    /// The answer cannot go on: why.
    Failed(String),
}

impl Next {
    /// The bits of the tokens that may come next, 32 a word; `None`: all may.
    #[must_use]
    pub fn mask(&self) -> Option<&[u32]> {
        if let Self::Of(mask) = self { Some(mask.as_slice()) } else { None }
    }

    fn allows(&self, token: u32) -> bool {
        match self {
            Self::Any => true,
            Self::Of(mask) => (token as usize) < mask.len() && mask.is_allowed(token),
            Self::Nothing | Self::Failed(_) => false,
        }
    }
}

/// The matcher of one answer. See the module's documentation.
#[derive(Debug)]
pub struct AnswerMatcher {
    constraint: Arc<Constraint>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The answer's tokens.
    answer: Vec<u32>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Nobody asked yet.
    New,
    Compiling(Arc<Compilation>),
    Live(Box<Live>),
    Failed(String),
}

struct Live {
    compiled: Compiled,
    matcher: Matcher,
    place: Place,
    /// Tokens that matcher and place are behind.
    taken: Vec<u32>,
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Live").field("place", &self.place).field("taken", &self.taken).finish_non_exhaustive()
    }
}

impl AnswerMatcher {
    /// The matcher of an answer that has the tokens `answer` already.
    #[must_use]
    pub fn new(constraint: Arc<Constraint>, answer: &[u32]) -> Self {
        Self { constraint, state: Mutex::new(State { answer: answer.to_vec(), stage: Stage::New }) }
    }

    /// Adds tokens to the answer.
    pub fn push(&self, tokens: &[u32]) {
        lock(&self.state).answer.extend_from_slice(tokens);
    }

    /// Has the grammar compiled, if it is not. Without `grammars`, the answer fails.
    pub fn prepare(&self, grammars: Option<&Grammars>) {
        let mut state = lock(&self.state);
        if matches!(state.stage, Stage::New) {
            state.stage = match grammars.map(|grammars| grammars.begin(&self.constraint.grammar)) {
                None => Stage::Failed("this instance has no tokenizer, which structured output needs".to_owned()),
                Some(Ok(compilation)) => Stage::Compiling(compilation),
                // Asked again when there is room.
                Some(Err(GrammarError::Busy(_))) => Stage::New,
                Some(Err(error)) => Stage::Failed(error.to_string()),
            };
        }
    }

    /// Whether [`AnswerMatcher::next`] may be called: the grammar is compiled, or cannot be.
    pub fn poll(&self, grammars: Option<&Grammars>) -> bool {
        self.prepare(grammars);
        let mut state = lock(&self.state);
        if let Stage::Compiling(compilation) = &state.stage {
            match compilation.poll() {
                None => {}
                Some(Ok(compiled)) => state.stage = Stage::Live(Box::new(Live::new(compiled, &self.constraint))),
                Some(Err(error)) => state.stage = Stage::Failed(error.to_string()),
            }
        }
        matches!(state.stage, Stage::Live(_) | Stage::Failed(_))
    }

    /// What may come behind the answer, and behind it and each of `drafts`: written to `out`. Behind a draft that may not come,
    /// nothing is known, and nothing matters.
    ///
    /// # Panics
    /// Before [`AnswerMatcher::poll`] was true.
    pub fn next(&self, drafts: &[u32], out: &mut Vec<Next>) {
        let State { answer, stage } = &mut *lock(&self.state);
        let rows = out.len() + 1 + drafts.len();
        match stage {
            Stage::Live(live) => {
                if let Err(why) = live.catch_up(&self.constraint, answer) {
                    *stage = Stage::Failed(why.clone());
                    out.push(Next::Failed(why));
                } else {
                    live.rows(&self.constraint, drafts, out);
                }
            }
            Stage::Failed(why) => out.push(Next::Failed(why.clone())),
            Stage::New | Stage::Compiling(_) => panic!("the grammar is not compiled yet"),
        }
        out.resize(rows, Next::Any);
    }

    /// Takes a token that was drawn. True if the grammar has ended with it: nothing may follow.
    pub fn take(&self, token: u32) -> bool {
        let mut state = lock(&self.state);
        let Stage::Live(live) = &mut state.stage else { return false };
        // A failure shows when the next token is asked for.
        live.take(&self.constraint, token).is_ok() && live.has_ended()
    }
}

impl Live {
    fn new(compiled: Compiled, constraint: &Constraint) -> Self {
        let matcher = compiled.matcher();
        Self { compiled, matcher, place: Place::first(constraint.reasoning.as_ref()), taken: Vec::new() }
    }

    fn environment(&self) -> &Environment {
        &self.compiled.environment
    }

    /// Whether the grammar has ended.
    fn has_ended(&self) -> bool {
        self.place == Place::Content && !self.matcher.is_error() && self.matcher.is_stopped()
    }

    /// Goes to the end of `answer`.
    fn catch_up(&mut self, constraint: &Constraint, answer: &[u32]) -> Result<(), String> {
        if !answer.starts_with(&self.taken) {
            *self = Self::new(self.compiled.clone(), constraint);
        }
        answer[self.taken.len()..].iter().try_for_each(|token| self.take(constraint, *token))
    }

    /// Goes behind one more token.
    fn take(&mut self, constraint: &Constraint, token: u32) -> Result<(), String> {
        let before = self.place;
        self.taken.push(token);
        if let Some(reasoning) = &constraint.reasoning {
            self.place = before.behind(reasoning, &self.taken);
        }
        let is_content = before == Place::Content || (before == Place::Begin && self.place == Place::Content);
        if is_content {
            self.matcher.consume_token(token).map_err(|error| self.refusal(&error.to_string()))?;
        }
        Ok(())
    }

    /// Why the matcher takes no token, or has no mask.
    fn refusal(&self, error: &str) -> String {
        let error = error.lines().next().unwrap_or_default();
        format!("the answer does not go on in its grammar, or the grammar is too complex: {error}")
    }

    /// What may come next.
    fn next(&mut self, constraint: &Constraint) -> Next {
        let reasoning = constraint.reasoning.as_ref();
        match self.place {
            Place::Reasoning | Place::Header if reasoning.is_some_and(|of| of.may_end) => return Next::Any,
            Place::Reasoning | Place::Header => return Next::Of(self.environment().unending.clone()),
            Place::Begin | Place::Content => {}
        }
        if self.has_ended() {
            return Next::Nothing;
        }
        let mut mask = match self.matcher.compute_mask() {
            Ok(mask) => mask,
            Err(error) => return Next::Failed(self.refusal(&error.to_string())),
        };
        if self.taken.is_empty() {
            mask.and(&self.environment().first);
        }
        let opens = reasoning.and_then(|of| of.opens).filter(|_| self.place == Place::Begin);
        if let Some(opens) = opens.filter(|id| *id < self.environment().vocab) {
            mask.allow_token(opens);
        }
        if !mask.and_is_zero(&self.environment().all) {
            return Next::Of(mask);
        }
        // A grammar that may end here, of a model without a token for it.
        if mask.is_zero() {
            Next::Failed("no token of this model goes on in the grammar".to_owned())
        } else {
            Next::Nothing
        }
    }

    /// The rows behind the answer and behind each of `drafts`; goes back to the answer's end.
    fn rows(&mut self, constraint: &Constraint, drafts: &[u32], out: &mut Vec<Next>) {
        out.push(self.next(constraint));
        let (place, tokens) = (self.place, self.taken.len());
        let mut consumed = 0;
        for draft in drafts {
            if !out.last().is_some_and(|next| next.allows(*draft)) || self.has_ended() {
                break;
            }
            let before = self.place;
            if self.take(constraint, *draft).is_err() {
                break;
            }
            let is_content = before == Place::Content || (before == Place::Begin && self.place == Place::Content);
            consumed += usize::from(is_content);
            out.push(self.next(constraint));
        }
        if self.taken.len() > tokens {
            if self.matcher.rollback(consumed).is_err() {
                // It is made again when the next token is asked for: no answer begins with this one.
                self.taken.push(u32::MAX);
                return;
            }
            self.taken.truncate(tokens);
            self.place = place;
        }
    }
}
