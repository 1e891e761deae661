//! Licence expressions (SPDX 2.3, annex D) and whether a list of accepted licences satisfies one.
//!
//! crates.io's old spelling with a slash (`MIT/Apache-2.0`) means OR.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

#[derive(Debug, PartialEq, Eq)]
enum Token {
    Open,
    Close,
    And,
    Or,
    With,
    Name(String),
}

fn tokens(expression: &str) -> Vec<Token> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    spaced
        .split_whitespace()
        .map(|word| match word {
            "(" => Token::Open,
            ")" => Token::Close,
            "AND" => Token::And,
            "OR" => Token::Or,
            "WITH" => Token::With,
            name => Token::Name(name.to_owned()),
        })
        .collect()
}

/// Whether the accepted licences satisfy the expression. A licence with an exception is accepted where the list names the
/// pair (`Apache-2.0 WITH LLVM-exception`) or the licence alone, since exceptions only add permissions.
///
/// # Errors
/// When the expression cannot be parsed.
pub(crate) fn satisfied(expression: &str, accepted: &BTreeSet<String>) -> Result<bool> {
    let tokens = tokens(expression);
    let mut parser = Parser { tokens: &tokens, at: 0, accepted };
    match (parser.any(), parser.at == tokens.len()) {
        (Some(value), true) => Ok(value),
        _ => bail!("cannot parse the licence expression `{expression}`"),
    }
}

struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
    accepted: &'a BTreeSet<String>,
}

impl Parser<'_> {
    fn take(&mut self, token: &Token) -> bool {
        let found = self.tokens.get(self.at) == Some(token);
        self.at += usize::from(found);
        found
    }

    /// Alternatives: OR binds weakest.
    fn any(&mut self) -> Option<bool> {
        let mut value = self.all()?;
        while self.take(&Token::Or) {
            value |= self.all()?;
        }
        Some(value)
    }

    fn all(&mut self) -> Option<bool> {
        let mut value = self.one()?;
        while self.take(&Token::And) {
            value &= self.one()?;
        }
        Some(value)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take(&Token::Open) {
            let value = self.any()?;
            return self.take(&Token::Close).then_some(value);
        }
        let name = self.name()?;
        if !self.take(&Token::With) {
            return Some(self.accepted.contains(&name));
        }
        let pair = format!("{name} WITH {}", self.name()?);
        Some(self.accepted.contains(&pair) || self.accepted.contains(&name))
    }

    fn name(&mut self) -> Option<String> {
        let Some(Token::Name(name)) = self.tokens.get(self.at) else { return None };
        self.at += 1;
        Some(name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(expression: &str) -> bool {
        satisfied(expression, &["MIT", "Apache-2.0", "ISC"].map(str::to_owned).into()).unwrap()
    }

    #[test]
    fn alternatives_need_one_and_conjunctions_all() {
        assert!(check("MIT"));
        assert!(!check("GPL-3.0-only"));
        assert!(check("GPL-3.0-only OR MIT"));
        assert!(!check("GPL-3.0-only AND MIT"));
        assert!(check("Apache-2.0 AND ISC"));
        assert!(check("MIT/GPL-2.0"));
        assert!(check("GPL-2.0 / MIT"));
    }

    #[test]
    fn and_binds_tighter_than_or_and_parentheses_win() {
        assert!(check("MIT OR GPL-3.0-only AND GPL-2.0-only"));
        assert!(!check("(MIT OR GPL-3.0-only) AND GPL-2.0-only"));
        assert!(check("(MIT OR GPL-3.0-only) AND ISC"));
    }

    #[test]
    fn exceptions_follow_their_licence() {
        assert!(check("Apache-2.0 WITH LLVM-exception"));
        assert!(!check("GPL-2.0-only WITH Classpath-exception-2.0"));
        let pair: BTreeSet<String> = ["GPL-2.0-only WITH Classpath-exception-2.0".to_owned()].into();
        assert!(satisfied("GPL-2.0-only WITH Classpath-exception-2.0", &pair).unwrap());
        assert!(!satisfied("GPL-2.0-only", &pair).unwrap());
    }

    #[test]
    fn nonsense_is_an_error() {
        for text in ["", "MIT OR", "(MIT", "MIT)", "MIT Apache-2.0", "AND MIT", "MIT WITH"] {
            assert!(satisfied(text, &BTreeSet::new()).is_err(), "{text}");
        }
    }
}
