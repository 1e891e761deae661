//! Constants of the sources by name, to check values that pages quote. A duration is in milliseconds, a size in bytes.

use std::collections::{BTreeMap, BTreeSet};

/// Constants that could be evaluated.
#[derive(Debug, Default)]
pub(super) struct Limits {
    values: BTreeMap<String, u64>,
    /// Names that have several values, in different files.
    ambiguous: BTreeSet<String>,
}

impl Limits {
    /// Reads `const NAME: type = value;`, one a line. A value is a number, another constant, a duration of these, or a shift, product,
    /// quotient or sum of two of them. Constants of earlier texts win over those of the same name in later ones.
    pub(super) fn parse(first: &str, others: &str) -> Self {
        let mut out = Self::default();
        // A constant may use one that a later text defines.
        for _ in 0..2 {
            out.read(first);
        }
        let own: BTreeSet<String> = out.values.keys().cloned().collect();
        let others: Vec<&str> = others.lines().filter(|line| name(line).is_some_and(|n| !own.contains(n))).collect();
        let others = others.join("\n");
        for _ in 0..2 {
            out.read(&others);
        }
        out
    }

    fn read(&mut self, text: &str) {
        for line in text.lines() {
            let Some((name, value)) = name(line).zip(line.split_once("= ")).map(|(name, of)| (name, of.1)) else {
                continue;
            };
            let Some(value) = self.value(value.trim_end().trim_end_matches(';')) else { continue };
            if self.values.insert(name.to_owned(), value).is_some_and(|before| before != value) {
                self.ambiguous.insert(name.to_owned());
            }
        }
    }

    fn value(&self, text: &str) -> Option<u64> {
        type Operation = fn(u64, u64) -> Option<u64>;
        let operations: [(&str, Operation); 4] = [
            (" << ", |a, b| a.checked_shl(u32::try_from(b).ok()?)),
            (" + ", u64::checked_add),
            (" * ", u64::checked_mul),
            (" / ", u64::checked_div),
        ];
        for (function, factor) in [("Duration::from_secs(", 1_000), ("Duration::from_millis(", 1)] {
            if let Some(rest) = text.strip_prefix(function) {
                return self.value(rest.strip_suffix(')')?)?.checked_mul(factor);
            }
        }
        for (sign, operation) in operations {
            if let Some((a, b)) = text.split_once(sign) {
                return operation(self.value(a)?, self.value(b)?);
            }
        }
        let of = text.trim().trim_start_matches("limits::");
        of.replace('_', "").parse().ok().or_else(|| self.values.get(of).copied())
    }

    /// Checks that the constant exists and has the quoted value.
    ///
    /// # Errors
    /// A message with both values.
    pub(super) fn check(&self, name: &str, quoted: &str) -> Result<(), String> {
        let value = *self.values.get(name).ok_or_else(|| format!("there is no limit `{name}`"))?;
        if self.ambiguous.contains(name) {
            return Err(format!(
                "constants of several files are called `{name}`: give the quoted one a name of its own"
            ));
        }
        match parse(quoted) {
            Some(of) if of == value => Ok(()),
            Some(of) => Err(format!("`{name}` is {value}, and the page says {quoted}, which is {of}")),
            None => Err(format!("`{name}` ({quoted}): a value is written `250 ms`, `6 s`, `1 MiB` or `64`")),
        }
    }
}

/// The name of the constant that a line defines.
fn name(line: &str) -> Option<&str> {
    let (before, rest) = line.split_once("const ")?;
    let (name, _) = rest.split_once(": ")?;
    let is_item = matches!(before.trim(), "" | "pub" | "pub(crate)" | "pub(super)");
    (is_item && is_constant(name)).then_some(name)
}

/// Whether a text is a constant's name.
pub(super) fn is_constant(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_uppercase()) && text.chars().all(|c| matches!(c, 'A'..='Z' | '0'..='9' | '_'))
}

/// What a unit multiplies: times in milliseconds, sizes in bytes.
fn factor(unit: &str) -> Option<u64> {
    Some(match unit {
        "" | "ms" | "bytes" | "tokens" | "rBlocks" | "times" => 1,
        "s" | "seconds" => 1_000,
        "min" | "minutes" => 60_000,
        "hours" => 3_600_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    })
}

/// A quoted value: a number with commas between thousands, perhaps a decimal point, and a unit.
fn parse(quoted: &str) -> Option<u64> {
    let (number, unit) = quoted.split_once(' ').unwrap_or((quoted, ""));
    let number = number.replace(',', "");
    let (whole, part) = number.split_once('.').unwrap_or((&number, ""));
    let scale = 10_u64.checked_pow(u32::try_from(part.len()).ok()?)?;
    let number = format!("{whole}{part}").parse::<u64>().ok()?.checked_mul(factor(unit)?)?;
    number.is_multiple_of(scale).then_some(number / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "/// A.\npub const A_MS: u64 = 6_000;\npub const B_BYTES: usize = 1 << 20;\npub const C: usize = B_BYTES;\n\
                        pub const D_DEADLINE: Duration = Duration::from_secs(30);\npub const E: u32 = f(1);\n";
    const OTHERS: &str = "const KEPT: Duration = Duration::from_millis(A_MS / 4);\nconst SUM_MS: u64 = limits::A_MS + A_MS;\n\
                          const A_MS: u64 = 1;\npub(crate) const TWICE: u64 = 1;\nconst TWICE: u64 = 2;\nlet const_a = 1;\n";

    #[test]
    fn constants_are_evaluated() {
        let limits = Limits::parse(TEXT, OTHERS);
        for (name, quoted) in [("A_MS", "6 s"), ("A_MS", "6,000 ms"), ("B_BYTES", "1 MiB"), ("C", "1024 KiB")] {
            assert_eq!(limits.check(name, quoted), Ok(()), "{name} {quoted}");
        }
        for (name, quoted) in [("D_DEADLINE", "30 s"), ("D_DEADLINE", "0.5 min"), ("KEPT", "1.5 s"), ("SUM_MS", "12 s")]
        {
            assert_eq!(limits.check(name, quoted), Ok(()), "{name} {quoted}");
        }
        assert!(!limits.values.contains_key("E"));
    }

    #[test]
    fn other_values_and_units_are_refused() {
        let limits = Limits::parse(TEXT, OTHERS);
        for (name, quoted) in
            [("A_MS", "6 ms"), ("A_MS", "6 days"), ("B_BYTES", "1 KiB"), ("E", "1"), ("KEPT", "1.4 s")]
        {
            assert!(limits.check(name, quoted).is_err(), "{name} {quoted}");
        }
        assert!(limits.check("TWICE", "2").unwrap_err().contains("several files"));
    }
}
