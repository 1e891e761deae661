//! A finding of a rule: what `cargo xtask tidy` prints, and tidy.toml excepts.

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// The rule's name, as tidy.toml spells it.
    pub(crate) rule: &'static str,
    /// Subject that an exception names: `crate -> crate`, a file, `file: function`.
    pub(crate) subject: String,
    pub(crate) message: String,
}

impl Finding {
    pub(crate) fn new(rule: &'static str, subject: impl Into<String>, message: impl Into<String>) -> Self {
        Self { rule, subject: subject.into(), message: message.into() }
    }
}
