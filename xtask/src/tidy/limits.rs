//! The constants of limits.rs by name, to check values that pages quote.

use std::collections::BTreeMap;

/// Constants that could be evaluated.
#[derive(Debug, Default)]
pub(super) struct Limits {
    values: BTreeMap<String, u64>,
}

impl Limits {
    /// Reads `pub const NAME: type = value;`. A value is a number, a shift of two, a sum of seconds or another constant above.
    pub(super) fn parse(text: &str) -> Self {
        let mut out = Self::default();
        for (_, rest) in text.lines().filter_map(|line| line.split_once("pub const ")) {
            let Some((name, value)) = rest.split_once(": ").zip(rest.split_once("= ")).map(|(n, v)| (n.0, v.1)) else {
                continue;
            };
            let value = out.value(value.trim_end().trim_end_matches(';'));
            if let Some(value) = value {
                out.values.insert(name.to_owned(), value);
            }
        }
        out
    }

    /// The value of an expression; durations are in milliseconds.
    fn value(&self, text: &str) -> Option<u64> {
        let number = |text: &str| text.trim().replace('_', "").parse::<u64>().ok();
        if let Some((value, shift)) = text.split_once(" << ") {
            return Some(number(value)? << number(shift)?);
        }
        if let Some(seconds) = text.strip_prefix("Duration::from_secs(") {
            return Some(number(seconds.trim_end_matches(')'))? * 1_000);
        }
        number(text).or_else(|| self.values.get(text).copied())
    }

    /// Checks that the constant exists and has the quoted value.
    ///
    /// # Errors
    /// A message with both values.
    pub(super) fn check(&self, name: &str, quoted: &str) -> Result<(), String> {
        let value = *self.values.get(name).ok_or_else(|| format!("there is no limit `{name}`"))?;
        match parse(quoted) {
            Some(of) if of == value => Ok(()),
            Some(of) => Err(format!("`{name}` is {value}, and the page says {quoted}, which is {of}")),
            None => Err(format!("`{name}` ({quoted}): a value is written `250 ms`, `6 s`, `1 MiB` or `64`")),
        }
    }
}

/// A quoted value: milliseconds, bytes, or a plain number with commas between thousands.
fn parse(quoted: &str) -> Option<u64> {
    let (number, unit) = quoted.split_once(' ').unwrap_or((quoted, ""));
    let number: u64 = number.replace(',', "").parse().ok()?;
    let factor = match unit {
        "" | "ms" | "bytes" | "tokens" | "rBlocks" | "times" => 1,
        "s" => 1_000,
        "min" => 60_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        _ => return None,
    };
    Some(number * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "/// A.\npub const A_MS: u64 = 6_000;\npub const B_BYTES: usize = 1 << 20;\npub const C: usize = B_BYTES;\n\
                        pub const D_DEADLINE: Duration = Duration::from_secs(30);\npub const E: u32 = f(1);\n";

    #[test]
    fn constants_are_evaluated() {
        let limits = Limits::parse(TEXT);
        for (name, quoted) in [("A_MS", "6 s"), ("A_MS", "6,000 ms"), ("B_BYTES", "1 MiB"), ("C", "1024 KiB")] {
            assert_eq!(limits.check(name, quoted), Ok(()), "{name} {quoted}");
        }
        assert_eq!(limits.check("D_DEADLINE", "30 s"), Ok(()));
        assert!(!limits.values.contains_key("E"));
    }

    #[test]
    fn other_values_and_units_are_refused() {
        let limits = Limits::parse(TEXT);
        for (name, quoted) in [("A_MS", "6 ms"), ("A_MS", "6 hours"), ("B_BYTES", "1 KiB"), ("E", "1")] {
            assert!(limits.check(name, quoted).is_err(), "{name} {quoted}");
        }
    }
}
